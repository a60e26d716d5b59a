"""The cubin cache: what makes a kernel compile again, what does not, and faults of files and folders."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpmrt.cuda.build import cubin_cache, nvrtc
from cpmrt.cuda.build import modules as compiler
from cpmrt.cuda.build.source import kernels_folder, read_source
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError, KernelCompileError

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """#include "outer.cuh"
#ifdef CPMRT_BF16
#define NAME scale_bf16
#else
#define NAME scale_fp16
#endif
extern "C" __global__ void NAME(float* out) { out[threadIdx.x] *= FACTOR * OUTER * INNER; }
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel folder with two kernels, one of which includes a header that includes another header."""
    folder = tmp_path / "sources"
    (folder / "include").mkdir(parents=True)
    (folder / "scale.cu").write_text(KERNEL)
    (folder / "plain.cu").write_text('extern "C" __global__ void plain(float* out) { *out = 1.0f; }\n')
    (folder / "include" / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n#define OUTER 2.0f\n')
    (folder / "include" / "inner.cuh").write_text("#pragma once\n#define INNER 3.0f\n")
    monkeypatch.setenv("CPMRT_KERNELS_DIR", str(folder))
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def fake_nvrtc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A replacement of NVRTC whose cubins say what they were made from; the fixture is the list of compiled files."""
    compiled: list[str] = []

    def compile_cubin(source: object, options: object) -> tuple[bytes, str]:
        compiled.append(source.file)  # type: ignore[attr-defined]
        return f"cubin of {source} {options}".encode(), ""

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.5.37")
    return compiled


def build(file: str = "scale.cu", arch: str = "sm_90", dtype: DType = DType.BFLOAT16, factor: int = 4) -> Path:
    return compiler.compile_module(file, arch, dtype, {"FACTOR": factor})


def test_a_warm_start_compiles_nothing(sources: Path, fake_nvrtc: list[str]) -> None:
    first = build()
    assert build() == first and fake_nvrtc == ["scale.cu"]


@pytest.mark.parametrize("header", ["outer.cuh", "inner.cuh"])
def test_an_edited_header_recompiles_what_includes_it(sources: Path, fake_nvrtc: list[str], header: str) -> None:
    first, other = build(), build("plain.cu")
    path = sources / "include" / header
    path.write_text(path.read_text() + "// edited\n")
    assert build() != first and build("plain.cu") == other
    assert fake_nvrtc == ["scale.cu", "plain.cu", "scale.cu"]


@pytest.mark.parametrize("change", [{"arch": "sm_80"}, {"dtype": DType.FLOAT16}, {"factor": 5}])
def test_every_option_is_part_of_the_key(sources: Path, fake_nvrtc: list[str], change: dict[str, object]) -> None:
    assert build() != build(**change)  # type: ignore[arg-type]
    assert len(fake_nvrtc) == 2


def test_another_compiler_compiles_again(sources: Path, fake_nvrtc: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setattr(nvrtc, "version", lambda: "12.9.86")
    build()
    assert len(fake_nvrtc) == 2


def test_a_machine_without_nvrtc_takes_what_was_built_for_it(
    sources: Path, fake_nvrtc: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()
    monkeypatch.setattr(nvrtc, "version", lambda: None)
    assert build() == first and len(fake_nvrtc) == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lambda path: path.write_bytes(b"")])
def test_a_damaged_cubin_is_compiled_again(
    sources: Path, fake_nvrtc: list[str], damage: Callable[[Path], object]
) -> None:
    path = build()
    content = path.read_bytes()
    damage(path)
    assert build().read_bytes() == content and len(fake_nvrtc) == 2
    assert build() == path and len(fake_nvrtc) == 2


def test_a_cache_that_cannot_be_written_is_replaced_with_one_warning(
    sources: Path, fake_nvrtc: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(blocked))
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in .*blocked.*CPMRT_CACHE_DIR") as warned:
        paths = compiler.compile_all("sm_90", DType.BFLOAT16, [("scale.cu", {"FACTOR": 1}), ("plain.cu", {})])
        assert all(path.read_bytes().startswith(b"cubin of") for path in paths)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.compile_module("plain.cu", "sm_90", DType.BFLOAT16, {}) == paths[1]
    assert len(fake_nvrtc) == 2


def test_what_must_last_is_not_compiled_where_it_cannot_be_kept(
    sources: Path, fake_nvrtc: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [("scale.cu", {"FACTOR": 1}), ("plain.cu", {})]
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(blocked))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*blocked.*: Not a directory; set CPMRT_CACHE_DIR"):
        compiler.compile_all("sm_90", DType.BFLOAT16, wanted, must_last=True)
    assert fake_nvrtc == []


def test_what_must_last_and_is_there_needs_no_folder_that_can_be_written(
    sources: Path, fake_nvrtc: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    made = compiler.compile_all("sm_90", DType.BFLOAT16, [("plain.cu", {})], must_last=True)
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert compiler.compile_all("sm_90", DType.BFLOAT16, [("plain.cu", {})], must_last=True) == made
    with pytest.raises(ConfigError, match="Read-only file system"):
        compiler.compile_all("sm_90", DType.BFLOAT16, [("scale.cu", {"FACTOR": 1})], must_last=True)


def test_a_disk_that_fills_up_is_an_error_for_what_must_last(
    sources: Path, fake_nvrtc: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(ConfigError, match="cannot be kept in .*cubins: No space left"):
        compiler.compile_all("sm_90", DType.BFLOAT16, [("plain.cu", {})], must_last=True)


def test_nothing_unfinished_stays_behind(sources: Path, fake_nvrtc: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.warns(RuntimeWarning, match="No space left"), pytest.raises(OSError, match="No space"):
        build()
    assert list(Path(os.environ["CPMRT_CACHE_DIR"]).rglob("*")) == [Path(os.environ["CPMRT_CACHE_DIR"]) / "cubins"]


def test_the_order_of_compile_all_is_that_of_its_input(sources: Path, fake_nvrtc: list[str]) -> None:
    modules = [("scale.cu", {"FACTOR": factor}) for factor in range(8)]
    paths = compiler.compile_all("sm_90", DType.FLOAT16, modules)
    assert paths == [build(dtype=DType.FLOAT16, factor=factor) for factor in range(8)]
    assert len(fake_nvrtc) == 8


def test_what_was_compiled_beforehand_is_only_loaded(
    sources: Path, fake_nvrtc: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=1))
    raw_module = SimpleNamespace(get_function=lambda _: function)
    cupy = SimpleNamespace(RawModule=lambda path: loaded.append(path) or raw_module)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    loaded, spec = list[str](), KernelSpec("scale", "scale.cu", constants=("FACTOR",))
    modules = compiler.Modules("sm_90", DType.BFLOAT16)
    modules.compile([("scale.cu", {"FACTOR": factor}) for factor in (4, 5, 4)])
    with monkeypatch.context() as only_loads:
        only_loads.setattr(compiler, "compile_module", None)
        modules.kernel(spec, {"FACTOR": 5})
    modules.kernel(spec, {"FACTOR": 6})
    assert loaded == [str(build(factor=5)), str(build(factor=6))] and len(fake_nvrtc) == 3


def test_a_type_without_kernels_is_refused(sources: Path) -> None:
    with pytest.raises(KernelCompileError, match="expected bfloat16 or float16, got float32"):
        build(dtype=DType.FLOAT32)


def test_a_missing_header_names_who_includes_it(sources: Path, fake_nvrtc: list[str]) -> None:
    (sources / "include" / "inner.cuh").unlink()
    with pytest.raises(KernelCompileError, match=r'header "inner\.cuh", which outer\.cuh includes, cannot be read'):
        build()


def test_a_folder_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPMRT_KERNELS_DIR", str(tmp_path))
    with pytest.raises(KernelCompileError, match=r"no kernel sources: expected \*\.cu in .*CPMRT_KERNELS_DIR"):
        kernels_folder()


def test_headers_that_include_each_other_end(sources: Path) -> None:
    (sources / "include" / "inner.cuh").write_text('#pragma once\n#include "outer.cuh"\n')
    assert read_source("scale.cu").headers.keys() == {"outer.cuh", "inner.cuh"}


def test_a_header_beside_the_file_that_includes_it_comes_before_one_in_include(sources: Path) -> None:
    (sources / "rows").mkdir()
    (sources / "rows" / "near.cu").write_text('#include "outer.cuh"\n')
    (sources / "rows" / "inner.cuh").write_text("#define INNER 4.0f\n")
    assert b"INNER 3.0f" in read_source("rows/near.cu").headers["inner.cuh"]
    (sources / "rows" / "outer.cuh").write_text('#include "inner.cuh"\n')
    assert b"INNER 4.0f" in read_source("rows/near.cu").headers["inner.cuh"]


def test_a_warm_start_does_not_load_nvrtc(sources: Path, needs_nvrtc_wheel: None) -> None:
    build("plain.cu")
    script = (
        "import sys\nfrom cpmrt.cuda.build import modules, nvrtc\nfrom cpmrt.dtypes import DType\n"
        "modules.compile_module('plain.cu', 'sm_90', DType.BFLOAT16, {'FACTOR': 4})\n"
        "assert 'cuda.bindings' not in sys.modules and 'nvrtc' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)


def test_processes_that_compile_at_once_share_one_cubin(sources: Path, needs_nvrtc_wheel: None) -> None:
    script = (
        "from cpmrt.cuda.build import modules\nfrom cpmrt.dtypes import DType\n"
        "print(modules.compile_module('scale.cu', 'sm_90', DType.BFLOAT16, {'FACTOR': 4}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    paths = [process.communicate(timeout=120)[0].strip() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert all(Path(path).read_bytes().startswith(b"\x7fELF") for path in paths)
    names = [path.name for path in cubin_cache.folder().iterdir()]
    assert {Path(path).name for path in paths} == set(names), "a process left another file behind"


@pytest.fixture
def needs_nvrtc_wheel(fresh_nvrtc: None) -> None:
    wheel = nvrtc.wheel_name("nvidia-cuda-nvrtc", nvrtc.bindings_major())
    try:
        importlib.metadata.version(wheel)
        importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"no {error.name} wheel: pip install 'cpmrt[dev]'")


def test_headers_of_another_version_are_refused_with_the_wheel_to_install(
    sources: Path, needs_nvrtc_wheel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda_runtime_api.h").write_text("#pragma once\n#define CUDART_VERSION  11080\n")
    monkeypatch.setattr(nvrtc, "header_folders", lambda: iter([tmp_path]))
    major, minor = nvrtc.library_version()
    wheel = nvrtc.wheel_name("nvidia-cuda-runtime", major)
    expected = rf'expected {major}\.{minor}, as NVRTC, got 11\.8 in .*pip install "{wheel}=={major}\.{minor}\.\*"'
    with pytest.raises(KernelCompileError, match=expected):
        build("plain.cu")


def test_the_right_headers_are_found_behind_wrong_ones(
    sources: Path, needs_nvrtc_wheel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 11080\n")
    candidates = [tmp_path, tmp_path / "absent", *nvrtc.header_folders()]
    monkeypatch.setattr(nvrtc, "header_folders", lambda: iter(candidates))
    assert build("plain.cu").read_bytes().startswith(b"\x7fELF")


def test_a_missing_library_is_named_with_the_wheels_to_install(
    sources: Path, needs_nvrtc_wheel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda import pathfinder

    def not_found(_: str) -> None:
        raise pathfinder.DynamicLibNotFoundError("no libnvrtc")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    expected = r'NVRTC is not installed.*-m pip install "nvidia-cuda-nvrtc\S*==1\d\.\d\.\*" "nvidia-cuda-runtime'
    with pytest.raises(KernelCompileError, match=expected):
        build("plain.cu")


def test_missing_bindings_are_named_with_the_wheel_to_install(
    sources: Path, fresh_nvrtc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(nvrtc, "version", lambda: None)
    with pytest.raises(KernelCompileError, match=r'cuda\.bindings cannot be imported.*pip install "cuda-bindings=='):
        build("plain.cu")


def test_cubins_of_a_folder_that_cannot_be_written_are_found_beside_new_ones(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cubins in a read-only folder, such as those that `cpmrt compile` made for an image, are found beside new ones,
    which are kept elsewhere."""
    shipped = cubin_cache.store("a" * 64, "13.0", b"one")

    def refuse(dir: Path, **_: object) -> tuple[int, str]:
        if Path(dir) == shipped.parent:
            raise OSError(errno.EROFS, "Read-only file system")
        return mkstemp(dir=dir)

    mkstemp = tempfile.mkstemp
    monkeypatch.setattr(cubin_cache.tempfile, "mkstemp", refuse)
    cubin_cache.keep("v" * 64, "12", b"agrees", "verdict")
    assert cubin_cache.folder() == shipped.parent and cubin_cache.find("v" * 64, "12", "verdict") is None
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        made = cubin_cache.store("b" * 64, "13.0", b"two")
    assert cubin_cache.find("a" * 64, "13.0") == shipped and cubin_cache.find("b" * 64, "13.0") == made


def test_what_another_process_has_stored_or_taken_away_is_seen(sources: Path) -> None:
    """The cache reads its folder again when it has changed, so that files of other processes appear and disappear."""
    first = cubin_cache.store("a" * 64, "13.0", b"one")
    assert cubin_cache.find("a" * 64, "13.0") == first and cubin_cache.find("b" * 64, "13.0") is None
    other = first.with_name(first.name.replace("a" * 64, "b" * 64))
    other.write_bytes(b"one")
    os.utime(first.parent, ns=(1, 1))
    assert cubin_cache.find("b" * 64, "13.0") == other
    assert cubin_cache.find("b" * 64, "12.9") is None and cubin_cache.find("b" * 64, None) == other
    other.unlink()
    assert cubin_cache.find("b" * 64, "13.0") is None
