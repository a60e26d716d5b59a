"""Compiles kernel sources to cubins, through the cache, and loads their kernels on the device.

A module is one file compiled for one architecture, storage type and set of compile-time sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cpmrt.cores import usable_cores
from cpmrt.cuda.build import cubin_cache, nvrtc
from cpmrt.cuda.build.source import KernelSource, read_source
from cpmrt.cuda.build.spec import KernelSpec, macros_of
from cpmrt.cuda.driver.faults import LOST_CONTEXT, OUT_OF_MEMORY, device_fault
from cpmrt.cuda.driver.launch import Kernel, allow_wide_clusters
from cpmrt.dtypes import DType
from cpmrt.errors import KernelCompileError

if TYPE_CHECKING:
    from cupy import RawModule

    from cpmrt.cuda.build.spec import Constants

_PDL_CAPABILITY = 90
# Instructions that only sm_90 has need the target with "a". A cubin of plain sm_90 would run on no other device either.
_TARGETS = {"sm_90": "sm_90a"}
_Sizes = frozenset[tuple[str, int]]
_SUFFIXES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}


def options(arch: str, dtype: DType, constants: Constants) -> tuple[str, ...]:
    """Return the compiler's options. They hold no path, so that a cache can be copied to another machine."""
    sizes = sorted(macros_of(constants).items())
    return (
        f"-arch={_TARGETS.get(arch, arch)}",
        "-std=c++17",
        "-lineinfo",
        f"-DCPMRT_{suffix(dtype).upper()}",
        *(f"-D{name}={value}" for name, value in sizes),
    )


def suffix(dtype: DType) -> str:
    """Return the suffix of a kernel's name, "bf16" or "fp16". Raises KernelCompileError for a type without kernels."""
    if dtype not in _SUFFIXES:
        raise KernelCompileError("no kernels of this storage type", expected="bfloat16 or float16", actual=dtype.label)
    return _SUFFIXES[dtype]


def compile_module(file: str, arch: str, dtype: DType, constants: Constants) -> Path:
    """Return the cubin of one module, compiled if the cache has none of these sources, options and compiler.

    `arch` is such as "sm_90". Where NVRTC is not installed, a cubin that any version of it made is good enough. Raises
    KernelCompileError.
    """
    build = _Build.of(read_source(file), arch, dtype, constants)
    return build.cached() or build.compile()


def compile_all(
    arch: str, dtype: DType, modules: Iterable[tuple[str, Constants]], *, must_last: bool = False
) -> list[Path]:
    """Return the cubins of several (file, constants), compiled side by side. Raises as compile_module does.

    With `must_last` it raises ConfigError, before it compiles any, if new cubins could not be kept.
    """
    # One thread finds cached cubins faster than many, which wait for Python's lock.
    read = cache(read_source)
    builds = [_Build.of(read(file), arch, dtype, constants) for file, constants in modules]
    cached = [build.cached() for build in builds]
    if must_last and None in cached:
        cubin_cache.check_writable()
    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        made = [path or pool.submit(build.compile, must_last) for path, build in zip(cached, builds, strict=True)]
        try:
            return [path if isinstance(path, Path) else path.result() for path in made]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class Modules:
    """The modules of one architecture and storage type, compiled and loaded when a kernel is first asked for."""

    def __init__(self, arch: str, dtype: DType):
        self.arch, self.dtype = arch, dtype
        self._cubins: dict[tuple[str, _Sizes], Path] = {}
        self._loaded: dict[tuple[str, _Sizes], RawModule] = {}
        self._kernels: dict[tuple[str, _Sizes], Kernel] = {}

    def compile(self, modules: Iterable[tuple[str, Constants]]) -> None:
        """Find or compile several (file, constants) side by side: their kernels need only be loaded afterwards.

        Raises as compile_module does.
        """
        wanted = {(file, frozenset(macros_of(constants).items())): (file, constants) for file, constants in modules}
        self._cubins.update(zip(wanted, compile_all(self.arch, self.dtype, wanted.values()), strict=True))

    def kernel(self, spec: KernelSpec, constants: Constants) -> Kernel:
        """Return the kernel with these compile-time sizes, loaded on the current device.

        Raises KernelCompileError if it does not compile, does not load or is not there; DeviceError after a fault.
        """
        macros = macros_of(constants)
        key = spec.name, frozenset(macros.items())
        if key not in self._kernels:
            self._kernels[key] = self._load(spec, macros)
        return self._kernels[key]

    def cubin(self, spec: KernelSpec, constants: Constants) -> Path:
        """Return the cubin of the kernel's module. Its name identifies all that the kernel's results depend on.

        Raises as compile_module does.
        """
        return self._cubin(spec.file, macros_of(constants))

    def _cubin(self, file: str, macros: Mapping[str, int]) -> Path:
        found = self._cubins.get((file, frozenset(macros.items())))
        return found or compile_module(file, self.arch, self.dtype, macros)

    def _load(self, spec: KernelSpec, macros: Mapping[str, int]) -> Kernel:
        module, full_name = self._module(spec.file, macros), f"{spec.name}_{suffix(self.dtype)}"
        try:
            raw = module.get_function(full_name)
            if spec.has_wide_clusters is not None and spec.has_wide_clusters(macros):
                allow_wide_clusters(raw.kernel.ptr)
            return Kernel(full_name, raw.kernel.ptr, raw, has_pdl=_capability(self.arch) >= _PDL_CAPABILITY)
        except Exception as error:  # CuPy's driver error classes cannot be named without importing it
            if getattr(error, "status", None) in LOST_CONTEXT | {OUT_OF_MEMORY}:
                raise device_fault(error) from error
            what = f"{full_name} of {spec.file} does not load for {self.arch}: {error}"
            raise KernelCompileError(what, fix=f"delete the compiled kernels in {cubin_cache.folder()}") from error

    def _module(self, file: str, macros: Mapping[str, int]) -> RawModule:
        import cupy

        key = file, frozenset(macros.items())
        if key not in self._loaded:
            self._loaded[key] = cupy.RawModule(path=str(self._cubin(file, macros)))
        return self._loaded[key]


class _Build(NamedTuple):
    """A source with its options, and the key of its cubin in the cache."""

    source: KernelSource
    options: tuple[str, ...]
    key: str

    @classmethod
    def of(cls, source: KernelSource, arch: str, dtype: DType, constants: Constants) -> _Build:
        chosen = options(arch, dtype, constants)
        return cls(source, chosen, hashlib.sha256("\0".join((source.digest, *chosen)).encode()).hexdigest())

    def cached(self) -> Path | None:
        return cubin_cache.find(self.key, nvrtc.version())

    def compile(self, must_last: bool = False) -> Path:
        cubin, _ = nvrtc.compile_cubin(self.source, self.options)
        return cubin_cache.store(self.key, nvrtc.version() or "unknown", cubin, must_last=must_last)


def _capability(arch: str) -> int:
    """Return the number of an architecture: 90 for "sm_90" and "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("af"))
