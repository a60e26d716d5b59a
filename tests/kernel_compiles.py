"""Kernels compiled for tests: each source and options once in a run, whichever process asks first. No GPU."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from cpmrt.cuda.build import modules, nvrtc
from cpmrt.cuda.build.source import KernelSource, read_source
from cpmrt.dtypes import DType

if TYPE_CHECKING:
    from cpmrt.cuda.build.spec import Constants

VERBOSE = "--ptxas-options=-v"


@dataclass(frozen=True)
class Compiled:
    """A cubin, and the compiler's log with what ptxas says of registers and spills."""

    cubin: Path
    log: str


class Compiles:
    """Compiles modules into a folder that all processes of the test run share, so that each is compiled only once."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._process: ProcessPoolExecutor | None = None

    def module(
        self, file: str, arch: str, dtype: DType, constants: Constants, *, with_cuda12: bool = False
    ) -> Compiled:
        """Return the module compiled as cpmrt compiles it, or by NVRTC of CUDA 12."""
        source, options = read_source(file), (*modules.options(arch, dtype, constants), VERBOSE)
        key = hashlib.sha256("\0".join((source.digest, *options, str(with_cuda12))).encode()).hexdigest()
        cubin, log = self._folder / f"{key}.cubin", self._folder / f"{key}.log"
        with (self._folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not log.exists():
                content, text = (self._compile_with_cuda12 if with_cuda12 else nvrtc.compile_cubin)(source, options)
                cubin.write_bytes(content)
                log.write_text(text)
        return Compiled(cubin, log.read_text())

    def close(self) -> None:
        """End the process that compiles with CUDA 12, if there is one."""
        if self._process:
            self._process.shutdown()

    def _compile_with_cuda12(self, source: KernelSource, options: Sequence[str]) -> tuple[bytes, str]:
        # CUDA 12's NVRTC needs a process of its own: in this one the bindings would use it instead of theirs.
        self._process = self._process or ProcessPoolExecutor(1, get_context("spawn"))
        return self._process.submit(compile_with_cuda12, source, options).result()


@functools.cache
def cuda12() -> tuple[str, str] | None:
    """Return the paths of CUDA 12's NVRTC and headers, or None if their wheels are not installed."""
    nvidia = importlib.util.find_spec("nvidia")
    for folder in map(Path, (nvidia and nvidia.submodule_search_locations) or ()):
        library, headers = folder / "cuda_nvrtc" / "lib" / "libnvrtc.so.12", folder / "cuda_runtime" / "include"
        if library.is_file() and headers.is_dir():
            return str(library), str(headers)
    return None


def compile_with_cuda12(source: KernelSource, options: Sequence[str]) -> tuple[bytes, str]:
    """Return the cubin and the log, as `nvrtc.compile_cubin` does, from CUDA 12's compiler called through ctypes.

    The bindings of CUDA 13 do not load CUDA 12's compiler.
    """
    path, include = cuda12() or ("", "")
    library, program, size = ctypes.CDLL(path), ctypes.c_void_p(), ctypes.c_size_t()
    names, texts = [name.encode() for name in source.headers], list(source.headers.values())
    arguments = [option.encode() for option in (*options, f"--include-path={include}")]
    strings = [(ctypes.c_char_p * len(items))(*items) for items in (texts, names, arguments)]
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source.text, source.file.encode(), len(names), strings[0], strings[1]
    )
    assert status == 0, status
    status = library.nvrtcCompileProgram(program, len(arguments), strings[2])
    assert library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetProgramLog(program, log) == 0
    assert status == 0, log.value.decode()
    assert library.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    cubin = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetCUBIN(program, cubin) == 0
    assert library.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    return cubin.raw, log.value.decode()
