"""Every kernel compiles for every architecture, without a warning, and the hot ones keep to their registers. No GPU."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from cpmrt.cuda import compiler, nvrtc
from cpmrt.cuda.kernels import KERNELS, constant_sets, files
from cpmrt.cuda.source import KernelSource, kernels_folder, read_source
from cpmrt.dtypes import DType
from cpmrt.errors import KernelCompileError

ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
ELSEWHERE_TOO = ("sm_80", "sm_90")
"""Where the fast run also takes the other storage type: the oldest target, and the first with its own code path."""
OTHER_SIZES_ON = ("sm_80", "sm_87", "sm_90", "sm_120")
"""Where sizes after a file's first are built: sm_86 and sm_89 compile as sm_80 does, sm_100 as sm_90 and sm_120."""
RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
    re.DOTALL,
)


@dataclass(frozen=True)
class Build:
    """One module: a file for one architecture, storage type and set of sizes."""

    file: str
    arch: str
    dtype: DType
    constants: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        sizes = "".join(f",{name}={value}" for name, value in self.constants)
        return f"{self.file}-{self.arch}-{compiler.suffix(self.dtype)}{sizes}"

    def compile(self) -> tuple[bytes, str]:
        """The cubin and the compiler's log."""
        options = compiler.options(self.arch, self.dtype, dict(self.constants))
        return nvrtc.compile_cubin(read_source(self.file), [*options, "--ptxas-options=-v"])


def is_quick(arch: str, dtype: DType, constants: Mapping[str, int], file: str) -> bool:
    """Whether a build is in the fast run: bf16 on every architecture, fp16 on two, other sizes on sm_90."""
    if constants != constant_sets(file)[0]:
        return dtype is DType.BFLOAT16 and arch == "sm_90"
    return dtype is DType.BFLOAT16 or arch in ELSEWHERE_TOO


def builds() -> Iterator[object]:
    for file in files():
        for constants in constant_sets(file):
            for arch in ARCHITECTURES if constants == constant_sets(file)[0] else OTHER_SIZES_ON:
                for dtype in (DType.BFLOAT16, DType.FLOAT16):
                    build = Build(file, arch, dtype, tuple(sorted(constants.items())))
                    marks = () if is_quick(arch, dtype, constants, file) else (pytest.mark.slow,)
                    yield pytest.param(build, id=str(build), marks=marks)


@pytest.fixture(scope="module")
def needs_nvrtc() -> None:
    if nvrtc.version() is None:
        pytest.skip("no NVRTC: pip install 'cpmrt[dev]'")


@pytest.fixture(scope="module")
def compiled(needs_nvrtc: None, request: pytest.FixtureRequest) -> Iterator[dict[Build, Future[tuple[bytes, str]]]]:
    """Every build that this run asks for, compiling in parallel."""
    params = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = dict.fromkeys(spec.params["build"] for spec in params if spec and "build" in spec.params)
    with ThreadPoolExecutor() as pool:
        yield {build: pool.submit(build.compile) for build in wanted}
        pool.shutdown(cancel_futures=True)


def is_whole_elf(cubin: bytes) -> bool:
    """Whether the tables that the ELF header points to, the last parts of a cubin, are in the file."""
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 32)
    program_size, num_programs, section_size, num_sections = struct.unpack_from("<4H", cubin, 54)
    ends = program_headers + program_size * num_programs, section_headers + section_size * num_sections
    return cubin.startswith(b"\x7fELF") and max(ends) <= len(cubin)


def resources(log: str) -> dict[str, tuple[int, ...]]:
    """Kernel -> bytes of stack frame, spill stores and spill loads."""
    return {name: tuple(map(int, sizes)) for name, *sizes in RESOURCES.findall(log)}


@pytest.mark.parametrize("build", list(builds()))
def test_compiles_for_every_architecture(compiled: dict[Build, Future[tuple[bytes, str]]], build: Build) -> None:
    cubin, log = compiled[build].result()
    assert is_whole_elf(cubin)
    assert "warning" not in log, log
    tail = "_" + compiler.suffix(build.dtype)
    specs = {spec.name + tail: spec for spec in KERNELS if spec.file == build.file}
    used = resources(log)
    assert used and used.keys() <= specs.keys(), f"{sorted(used)} against the table's {sorted(specs)}"
    spilling = {name: sizes for name, sizes in used.items() if specs[name].hot and any(sizes)}
    assert not spilling, f"stack frame, spill stores, spill loads: {spilling}"


def test_a_spilling_kernel_is_seen(needs_nvrtc: None) -> None:
    text = b"""#include "types.cuh"
    extern "C" __global__ void KERNEL(spills)(float* out, const int* at) {
      float local[64];
      for (int i = 0; i < 64; i++) local[i] = out[i];
      for (int i = 0; i < 64; i++) local[at[i]] += local[at[i + 1]];
      for (int i = 0; i < 64; i++) out[i] = local[i];
    }"""
    header = (kernels_folder() / "include" / "types.cuh").read_bytes()
    source = KernelSource("spills.cu", text, {"types.cuh": header})
    options = compiler.options("sm_90", DType.FLOAT16, {})
    _, log = nvrtc.compile_cubin(source, [*options, "--ptxas-options=-v"])
    (stack_frame, _, _) = resources(log)["spills_fp16"]
    assert stack_frame >= 256


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("int x = ;", r"faulty\.cu does not compile for sm_80: faulty\.cu:2: expected an expression"),
        ("#error SIZE must be defined", r"faulty\.cu:2: .*SIZE must be defined"),
        ("a; b; c; d; e;", r"faulty\.cu:2: .*; faulty\.cu:2: .*\(and \d more\)$"),
    ],
)
def test_a_faulty_source_is_one_line_with_file_and_line(needs_nvrtc: None, statement: str, message: str) -> None:
    source = KernelSource("faulty.cu", f"__global__ void f() {{\n{statement}\n}}".encode(), {})
    with pytest.raises(KernelCompileError, match=message) as caught:
        nvrtc.compile_cubin(source, ["-arch=sm_80"])
    assert "\n" not in str(caught.value)


def test_an_architecture_that_the_compiler_does_not_know(needs_nvrtc: None) -> None:
    with pytest.raises(KernelCompileError, match=r"k\.cu does not compile for sm_1: .*--gpu-architecture"):
        nvrtc.compile_cubin(KernelSource("k.cu", b"", {}), ["-arch=sm_1"])
