"""Finds the GPU and says what it is. The first use of CuPy is here."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cpmrt import env
from cpmrt.collector import no_collections
from cpmrt.cuda.driver.faults import device_faults
from cpmrt.cuda.driver.occupancy import clusters_at_once, multiprocessors
from cpmrt.errors import NoDeviceError
from cpmrt.installation import install_extra
from cpmrt.memory.host_memory import available_bytes

MIN_CAPABILITY = 80
_PORTABLE_CAPABILITY, _PORTABLE_SHARED_BYTES = 86, 101376
"""Compute capability of the portable path, and its bytes of shared memory a block: the least that sm_80 to sm_89 have,
so that kernels that fit run on all of them."""


_OVER_HALF_BYTES = 1024
_OLDEST_SERIES = 12
"""The first major version of CUDA that there is an extra for."""
_FIRST = 0
"""The index of the GPU that cpmrt uses. CUDA_VISIBLE_DEVICES says which one that is."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Sizes in bytes; `driver_version` is the newest CUDA version that the driver knows, such as (13, 0).

    `capability` is the compute capability whose features the kernels use, such as 90: that of `arch`, or less on the
    portable path. `num_sms`: multiprocessors that this process may use. `whole_clusters`: how many clusters of eight
    blocks can run at once, a block to a multiprocessor; boards of one kind differ in it. `has_wide_clusters`: whether
    clusters of sixteen blocks can run.
    """

    index: int
    name: str
    arch: str
    capability: int
    num_sms: int
    shared_bytes_per_block: int
    total_bytes: int
    is_unified: bool
    driver_version: tuple[int, int]
    whole_clusters: int = 0
    has_wide_clusters: bool = False

    @property
    def is_portable(self) -> bool:
        """Whether kernels, compiled for `arch`, do without what came with sm_90 (see `env`)."""
        return self.arch != f"sm_{self.capability}"

    @property
    def lone_block_bytes(self) -> int:
        """The fewest bytes of shared memory with which a block leaves no room for a like one on its multiprocessor."""
        return self.shared_bytes_per_block // 2 + _OVER_HALF_BYTES

    def free_bytes(self) -> int:
        """Return the bytes that can be allocated now.

        Where CPU and GPU share memory the host is asked, because the driver counts page cache as used.
        """
        import cupy

        if self.is_unified:
            return available_bytes()
        with device_faults(), cupy.cuda.Device(self.index):
            free: int = cupy.cuda.runtime.memGetInfo()[0]
        return free


def open_device() -> Device:
    """Make the first GPU current. Raises NoDeviceError, with what to change, if cpmrt cannot use it."""
    cupy = _import_cupy()
    runtime = cupy.cuda.runtime
    driver = _usable_driver(runtime)
    try:
        count = runtime.getDeviceCount()
        if count:
            runtime.setDevice(_FIRST)
            properties = runtime.getDeviceProperties(_FIRST)
    except runtime.CUDARuntimeError as error:
        fix = "nvidia-smi must list a GPU (in a container: docker run --gpus all ...); see also `cpmrt doctor`"
        raise NoDeviceError("no GPU answers", actual=str(error), fix=fix) from None
    if not count:
        raise NoDeviceError("this process sees no GPU", fix="check CUDA_VISIBLE_DEVICES")
    capability = 10 * properties["major"] + properties["minor"]
    name = properties["name"].decode("utf-8", "replace")
    if capability < MIN_CAPABILITY:
        raise NoDeviceError(
            f"the GPU {name} is too old",
            expected="compute capability 8.0 or newer (Ampere)",
            actual=f"{capability // 10}.{capability % 10}",
            fix="use executor='reference' or another GPU",
        )
    shared_bytes = properties["sharedMemPerBlockOptin"]
    is_portable = capability >= 90 and env.asks_for_portable_kernels()
    has_clusters = capability >= 90 and not is_portable
    whole, wide = clusters_at_once((8, shared_bytes), (16, shared_bytes // 2)) if has_clusters else (0, 0)
    return Device(
        index=_FIRST,
        name=name,
        arch=f"sm_{capability}",
        capability=_PORTABLE_CAPABILITY if is_portable else capability,
        num_sms=multiprocessors(properties["multiProcessorCount"]),
        shared_bytes_per_block=min(shared_bytes, _PORTABLE_SHARED_BYTES) if is_portable else shared_bytes,
        total_bytes=properties["totalGlobalMem"],
        is_unified=bool(properties["integrated"]),
        driver_version=driver,
        whole_clusters=whole,
        has_wide_clusters=wide > 0,
    )


def _usable_driver(runtime: ModuleType) -> tuple[int, int]:
    driver, built_for = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not driver:
        raise _no_driver()
    series, needed = driver // 1000, built_for // 1000
    if series < needed:
        older = f", or: {install_extra(f'cuda{series}')}" if series >= _OLDEST_SERIES else ""
        raise NoDeviceError(
            "the NVIDIA driver is too old for the installed CuPy",
            expected=f"CUDA {needed}.0 or newer",
            actual=f"CUDA {series}.{driver % 1000 // 10}",
            fix=f"update the driver{older}",
        )
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        fix = install_extra(f"cuda{needed}")
        raise NoDeviceError(f"the driver's bindings cannot be imported ({error})", fix=fix) from None
    return series, driver % 1000 // 10


def _no_driver() -> NoDeviceError:
    return NoDeviceError("no NVIDIA driver (libcuda.so.1)", fix="install the driver, or use executor='reference'")


_stand_in: list[tempfile.TemporaryDirectory[str]] = []


def _import_cupy() -> ModuleType:
    """Import CuPy, with a temporary cache folder where its own cannot be written, as in a read-only home.

    CuPy creates the folder on import and fails if it cannot. Raises NoDeviceError, which names the driver if that is
    missing, else CuPy.
    """
    if "cupy" not in sys.modules and not _can_write(env.cupy_cache_dir()):
        _stand_in.append(tempfile.TemporaryDirectory(prefix="cpmrt-cupy-"))
        env.set_cupy_cache_dir(Path(_stand_in[0].name))
    try:
        with no_collections():
            return importlib.import_module("cupy")
    except ImportError as error:
        if not _has_driver():
            raise _no_driver() from None
        fix = f"{install_extra('cuda13')} (for a driver older than 580: {install_extra('cuda12')})"
        raise NoDeviceError(f"CuPy cannot be imported ({error})", fix=fix) from None


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
