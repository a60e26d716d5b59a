"""Every kernel compiles for every architecture, without a warning, and the hot ones keep to their registers. No GPU."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from kernel_builds import constant_sets
from kernel_compiles import VERBOSE, Compiled, Compiles, cuda12

from cpmrt.cuda.build import modules as compiler
from cpmrt.cuda.build import nvrtc
from cpmrt.cuda.build.source import KernelSource, with_headers
from cpmrt.cuda.kernels import KERNELS, files
from cpmrt.dtypes import DType
from cpmrt.errors import KernelCompileError

ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
NOT_IN_CUDA_12 = ("sm_103", "sm_110", "sm_121")
BOTH_TYPES_ON = ("sm_80", "sm_87", "sm_90")
"""Architectures for which fp16 is built besides bf16: older targets, and the first one with its own code path."""
IN_FIRST_TIER = (("sm_87", DType.FLOAT16), ("sm_90", DType.BFLOAT16))
"""The (architecture, storage type) pairs whose builds of each file's first sizes belong to the first tier of tests."""
OTHER_SIZES_ON = ("sm_87", "sm_90")
"""Architectures for which sizes after a file's first are built: the others compile as one of these does."""
WITHOUT_CLUSTERS = ("sm_80", "sm_86", "sm_87", "sm_89")
MOST_SHARED_BYTES = {"sm_87": 166_912, "sm_90": 232_448}
RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
    re.DOTALL,
)


@dataclass(frozen=True)
class Build:
    """One module to compile: a file for one architecture, storage type and set of sizes."""

    file: str
    arch: str
    dtype: DType
    constants: tuple[tuple[str, int], ...]
    cuda12: bool = False

    def __str__(self) -> str:
        sizes = "".join(f",{name}={value}" for name, value in self.constants)
        return f"{self.file}-{self.arch}-{compiler.suffix(self.dtype)}{sizes}"

    def compile(self, compiles: Compiles) -> Compiled:
        return compiles.module(self.file, self.arch, self.dtype, dict(self.constants), with_cuda12=self.cuda12)


def builds() -> Iterator[Any]:
    """Yield builds of every file: its first sizes for all architectures, on BOTH_TYPES_ON also as fp16, and other sizes
    for OTHER_SIZES_ON."""
    for file in files():
        for constants in constant_sets(file):
            is_first = constants == constant_sets(file)[0]
            for arch in ARCHITECTURES if is_first else OTHER_SIZES_ON:
                if file not in files(arch):
                    continue
                if constants.get("CLUSTERS", 0) and arch in WITHOUT_CLUSTERS:
                    continue
                if not is_first and constants.get("SMEM_BYTES", 0) > MOST_SHARED_BYTES[arch]:
                    continue
                has_both = arch in BOTH_TYPES_ON if is_first else arch == "sm_90"
                for dtype in (DType.BFLOAT16, DType.FLOAT16) if has_both else (DType.BFLOAT16,):
                    module = Build(file, arch, dtype, tuple(sorted(constants.items())))
                    is_in_first = is_first and (arch, dtype) in IN_FIRST_TIER
                    yield pytest.param(module, id=str(module), marks=() if is_in_first else (pytest.mark.all,))


def builds_with_cuda12() -> Iterator[object]:
    """Yield the builds of each file's first sizes in bf16 with the oldest supported compiler, for every architecture
    that it knows."""
    for module in (param.values[0] for param in builds()):
        if module.arch in NOT_IN_CUDA_12:
            continue
        if module.dtype is DType.BFLOAT16 and dict(module.constants) == constant_sets(module.file)[0]:
            yield pytest.param(replace(module, cuda12=True), id=str(module))


@pytest.fixture(scope="module")
def needs_nvrtc() -> None:
    if nvrtc.version() is None:
        pytest.skip("no NVRTC: pip install 'cpmrt[dev]'")


def is_whole_elf(cubin: bytes) -> bool:
    """Return whether a cubin is complete: the tables that its ELF header points to, its last parts, lie within the
    file."""
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 32)
    program_size, num_programs, section_size, num_sections = struct.unpack_from("<4H", cubin, 54)
    ends = program_headers + program_size * num_programs, section_headers + section_size * num_sections
    return cubin.startswith(b"\x7fELF") and max(ends) <= len(cubin)


def resources(log: str) -> dict[str, tuple[int, ...]]:
    """Return the bytes of stack frame, spill stores and spill loads of each kernel, from the compiler's log."""
    return {name: tuple(map(int, sizes)) for name, *sizes in RESOURCES.findall(log)}


@pytest.mark.parametrize("build", list(builds()))
def test_compiles_for_every_architecture(compiles: Compiles, build: Build) -> None:
    """No module may spill, except row_layers.cu with all layers of the 0.5B and 132 blocks on sm_87, where no device
    has so many multiprocessors: 8 bytes."""
    sizes = {("INNER", 4096), ("GRID", 132)}
    is_spilling = build.file.endswith("row_layers.cu") and build.arch == "sm_87" and sizes <= set(build.constants)
    check_build(build, build.compile(compiles), most_spilled=8 if is_spilling else 0)


@pytest.mark.all
@pytest.mark.skipif(cuda12() is None, reason="needs NVRTC of CUDA 12: pip install 'cpmrt[dev]'")
@pytest.mark.parametrize("build", list(builds_with_cuda12()))
def test_compiles_with_cuda_12_too(compiles: Compiles, build: Build) -> None:
    """The oldest supported compiler may spill 8 bytes, in latent_attention.cu on sm_100, and nothing else."""
    is_spilling = build.file == "attention/latent_attention.cu" and build.arch == "sm_100"
    check_build(build, build.compile(compiles), most_spilled=8 if is_spilling else 0)


def check_build(build: Build, compiled: Compiled, *, most_spilled: int = 0) -> None:
    log = compiled.log
    assert is_whole_elf(compiled.cubin.read_bytes())
    assert "warning" not in log and "Potential Performance Loss" not in log, log
    tail = "_" + compiler.suffix(build.dtype)
    specs = {spec.name + tail: spec for spec in KERNELS if spec.file == build.file}
    used = resources(log)
    assert used and used.keys() <= specs.keys(), f"{sorted(used)} against the table's {sorted(specs)}"
    spilling = {name: sizes for name, sizes in used.items() if specs[name].hot and max(sizes) > most_spilled}
    assert not spilling, f"stack frame, spill stores, spill loads: {spilling}"


def test_a_spilling_kernel_is_seen(needs_nvrtc: None) -> None:
    text = b"""#include "types.cuh"
    extern "C" __global__ void KERNEL(spills)(float* out, const int* at) {
      float local[64];
      for (int i = 0; i < 64; i++) local[i] = out[i];
      for (int i = 0; i < 64; i++) local[at[i]] += local[at[i + 1]];
      for (int i = 0; i < 64; i++) out[i] = local[i];
    }"""
    source = with_headers("spills.cu", text)
    options = compiler.options("sm_90", DType.FLOAT16, {})
    _, log = nvrtc.compile_cubin(source, [*options, VERBOSE])
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
