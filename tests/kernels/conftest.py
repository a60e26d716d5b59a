"""Fixtures of the kernel tests: `cuda` compiles kernels, uploads arrays, launches and reads back; `compiles` compiles
modules without a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kernel_compiles import Compiles

from cpmrt.cuda.build import nvrtc
from cpmrt.cuda.kernels import KERNELS
from cpmrt.dtypes import DType, from_float32, to_float32

_SPECS = {spec.name: spec for spec in KERNELS}


class Cuda:
    """One device with one stream, for tests of kernels. Of its methods `array`, `numpy` and `sync` wait for the
    stream."""

    def __init__(self) -> None:
        cupy = pytest.importorskip("cupy")
        from cpmrt.cuda.driver.device import open_device

        self.cupy, self.device = cupy, open_device()
        self.arch = self.device.arch
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._modules: dict[DType, Any] = {}

    def kernel(self, name: str, dtype: DType, **constants: int) -> Callable[..., None]:
        """Return the kernel of this name as a callable(grid, block, *args, smem=0, pdl=False).

        `grid` and `block` are ints or tuples; `args` are device arrays, np.int32, np.float32, np.uint64, or None for a
        null pointer.
        """
        from cpmrt.cuda.driver.launch import launch

        kernel = self.launcher(dtype).modules.kernel(_SPECS[name], constants)

        def call(grid: Any, block: Any, *args: Any, smem: int = 0, pdl: bool = False) -> None:
            launch(self.stream, kernel, grid, block, smem, args, pdl=pdl)

        return call

    def launcher(self, dtype: DType, *, pdl: bool = False) -> Any:
        """Return a launcher for ops of storage type `dtype` on this stream."""
        from cpmrt.cuda.build.launcher import Launcher
        from cpmrt.cuda.build.modules import Modules

        if dtype not in self._modules:
            self._modules[dtype] = Modules(self.arch, dtype)
        return Launcher(self.stream, self._modules[dtype], use_pdl=pdl)

    def array(self, values: Any, dtype: DType | None = None) -> Any:
        """Return a device copy of `values`: rounded to the storage words of `dtype`, or unchanged if `dtype` is
        None."""
        values = np.asarray(values)
        words = values if dtype is None else from_float32(values.astype(np.float32, copy=False), dtype)
        with self.stream:
            device_array = self.cupy.asarray(np.ascontiguousarray(words))
        self.stream.synchronize()
        return device_array

    def numpy(self, device_array: Any, dtype: DType | None = None) -> np.ndarray[Any, Any]:
        """Wait for all launches and return a host copy: float32 from words of `dtype`, or the array unchanged if it is
        None."""
        self.sync()
        words = self.cupy.asnumpy(device_array)
        return words if dtype is None else to_float32(words, dtype)

    def sync(self) -> None:
        """Wait for every launch; raise the error of a kernel that failed."""
        self.stream.synchronize()


@pytest.fixture(scope="session")
def cuda() -> Cuda:
    """The device and its stream; only for tests marked `gpu`."""
    return Cuda()


@pytest.fixture(scope="session")
def compiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiles]:
    """A service that compiles modules without a GPU, each once in a test run: the run's processes share a folder."""
    if nvrtc.version() is None:
        pytest.skip("no NVRTC: pip install 'cpmrt[dev]'")
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with contextlib.closing(Compiles(shared / "compiles")) as service:
        yield service
