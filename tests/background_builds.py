"""Modules compiled in processes of their own: by name, whatever a test has put in the compiler's place meanwhile."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from cpmrt.cuda.build import nvrtc
from cpmrt.cuda.build.source import KernelSource


def build(source: KernelSource, options: Sequence[str]) -> tuple[bytes, str]:
    """The cubin, and the compiler's log with what ptxas says."""
    return nvrtc.compile_cubin(source, [*options, "--ptxas-options=-v"])


@functools.cache
def cuda12() -> tuple[str, str] | None:
    """NVRTC of CUDA 12 and its headers, where their wheels lie beside those of the CUDA in use; else None."""
    nvidia = importlib.util.find_spec("nvidia")
    for folder in map(Path, (nvidia and nvidia.submodule_search_locations) or ()):
        library, headers = folder / "cuda_nvrtc" / "lib" / "libnvrtc.so.12", folder / "cuda_runtime" / "include"
        if library.is_file() and headers.is_dir():
            return str(library), str(headers)
    return None


def build_with_cuda12(source: KernelSource, options: Sequence[str]) -> tuple[bytes, str]:
    """The same with CUDA 12's compiler, which the bindings of CUDA 13 do not load."""
    path, include = cuda12() or ("", "")
    library, program, size = ctypes.CDLL(path), ctypes.c_void_p(), ctypes.c_size_t()
    names, texts = [name.encode() for name in source.headers], list(source.headers.values())
    arguments = [option.encode() for option in (*options, "--ptxas-options=-v", f"--include-path={include}")]
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
