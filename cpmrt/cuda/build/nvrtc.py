"""Finds NVIDIA's run-time compiler and the CUDA headers of its version, and turns a source into a cubin.

It needs no GPU and no driver. It is loaded when something is compiled, not before.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cpmrt.cuda.build.source import KernelSource
from cpmrt.errors import KernelCompileError

_ERROR = re.compile(r"^(?P<file>[^\s(]+)\((?P<line>\d+)\): (?:catastrophic )?error[ :]*(?P<what>.*)$", re.MULTILINE)
_CUDART_VERSION = re.compile(r"^#define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)
_SHOWN_ERRORS = 3
# The minor versions that the extras cuda12 and cuda13 of pyproject.toml pin.
_PINNED_MINOR = {12: 9, 13: 5}


@functools.cache
def version() -> str | None:
    """Return the version of NVRTC that would compile, such as "13.5.37"; None if there is none.

    Where it comes from a wheel the library is not loaded for this: that would cost a warm start 100 ms.
    """
    try:
        return importlib.metadata.version(wheel_name("nvidia-cuda-nvrtc", bindings_major()))
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return "{}.{}".format(*library_version())
    except KernelCompileError:
        return None


def compile_cubin(source: KernelSource, options: Sequence[str]) -> tuple[bytes, str]:
    """Return the cubin of a source and the compiler's log (warnings, and what `--ptxas-options=-v` asks for).

    The headers of the kernel folder are taken from `source`, so that what is compiled is what was hashed. Raises
    KernelCompileError with file and line for a faulty source, or with the command that installs what is missing.
    """
    nvrtc = _bindings()
    every_option = [*options, f"--include-path={_cuda_headers(library_version())}"]
    arguments = [option.encode() for option in every_option]
    headers = list(source.headers.items())
    names, texts = [name.encode() for name, _ in headers], [text for _, text in headers]
    program = _value(nvrtc.nvrtcCreateProgram(source.text, source.file.encode(), len(headers), texts, names))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = bytes(_value(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0").decode("utf-8", "replace").strip()
        if int(status):
            raise _refused(source.file, options, text or status.name)
        cubin = bytes(_value(nvrtc.nvrtcGetCUBINSize(program)))
        _value(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _refused(file: str, options: Sequence[str], log: str) -> KernelCompileError:
    arch = next((option.partition("=")[2] for option in options if option.startswith("-arch=")), "any architecture")
    found = [match.group("file", "line", "what") for match in _ERROR.finditer(log)]
    if not found:
        return KernelCompileError(f"{file} does not compile for {arch}: {log.splitlines()[0]}")
    shown = "; ".join(f"{name}:{line}: {what}" for name, line, what in found[:_SHOWN_ERRORS])
    more = f" (and {len(found) - _SHOWN_ERRORS} more)" if len(found) > _SHOWN_ERRORS else ""
    return KernelCompileError(f"{file} does not compile for {arch}: {shown}{more}")


@functools.cache
def _bindings() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        wheels = f"cuda-bindings=={bindings_major()}.*"
        raise KernelCompileError(f"cuda.bindings cannot be imported ({error})", fix=_pip(wheels)) from None
    bindings: ModuleType = nvrtc
    return bindings


@functools.cache
def _library() -> Path:
    """Load the library and return its path, so that what stands beside it can be found."""
    _bindings()
    from cuda import pathfinder

    try:
        return Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path or "")
    except (pathfinder.DynamicLibNotFoundError, OSError, RuntimeError):
        major = bindings_major()
        wheels = [
            f"{wheel_name(name, major)}=={major}.{_PINNED_MINOR[major]}.*"
            for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
        ]
        raise KernelCompileError("NVRTC is not installed (no libnvrtc that loads)", fix=_pip(*wheels)) from None


@functools.cache
def library_version() -> tuple[int, int]:
    """Return the version (major, minor) that the library reports; this loads it. Raises KernelCompileError."""
    _library()
    status, major, minor = _bindings().nvrtcVersion()
    if int(status):
        raise KernelCompileError(f"NVRTC does not start: {status.name}", fix="reinstall its wheel")
    return major, minor


@functools.cache
def _cuda_headers(compiler: tuple[int, int]) -> Path:
    """Return the CUDA headers of the compiler's own version: another version's may compile, to something else."""
    found = {folder: _header_version(folder) for folder in header_folders()}
    for folder, headers in found.items():
        if headers == compiler:
            return folder
    major, minor = compiler
    seen = ", ".join(f"{version[0]}.{version[1]} in {folder}" for folder, version in found.items() if version)
    raise KernelCompileError(
        "no CUDA headers of the compiler's version",
        expected=f"{major}.{minor}, as NVRTC",
        actual=seen or "none",
        fix=_pip(f"{wheel_name('nvidia-cuda-runtime', major)}=={major}.{minor}.*"),
    )


def header_folders() -> Iterator[Path]:
    """Yield the folders that may hold CUDA headers, the likeliest first."""
    from cuda import pathfinder

    located = pathfinder.find_nvidia_header_directory("cudart")
    if located:
        yield Path(located)
    yield _library().parent.parent / "include"


def _header_version(folder: Path) -> tuple[int, int] | None:
    try:
        text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = _CUDART_VERSION.search(text)
    return divmod(int(match.group(1)) // 10, 100) if match else None


def bindings_major() -> int:
    """Return the CUDA series in use: that of the installed bindings, the newest if there are none."""
    try:
        major = int(importlib.metadata.version("cuda-bindings").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return max(_PINNED_MINOR)
    return major if major in _PINNED_MINOR else max(_PINNED_MINOR)


def wheel_name(name: str, major: int) -> str:
    """Return a wheel's name: those of CUDA 12 carry the series in it, from 13 on they do not."""
    return f"{name}-cu12" if major == 12 else name


def _pip(*wheels: str) -> str:
    return f"{sys.executable} -m pip install " + " ".join(f'"{wheel}"' for wheel in wheels)


def _value(returned: tuple[Any, ...]) -> Any:
    """Return the value of a call of the bindings, which return their status first."""
    status, *values = returned
    if int(status):
        raise KernelCompileError(f"NVRTC fails: {status.name}")
    return values[0] if values else None
