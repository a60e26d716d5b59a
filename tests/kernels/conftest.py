"""The `cuda` fixture: compile a kernel, put arrays on the device, launch, read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType, from_float32, to_float32


class Cuda:
    """One device, one stream. Nothing here waits but `numpy` and `sync`."""

    def __init__(self) -> None:
        cupy = pytest.importorskip("cupy")
        from cpmrt.cuda.device import open_device

        self.cupy, self.device = cupy, open_device()
        self.arch = self.device.arch
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._modules: dict[DType, Any] = {}

    def kernel(self, file: str, name: str, dtype: DType, **constants: int) -> Callable[..., None]:
        """The kernel `name` of `file` as a callable(grid, block, *args, smem=0, pdl=False, cluster=None).

        `grid` and `block` are ints or tuples; `args` are device arrays, np.int32, np.float32, np.uint64, or None for a
        null pointer.
        """
        from cpmrt.cuda.compiler import Modules
        from cpmrt.cuda.launch import launch

        if dtype not in self._modules:
            self._modules[dtype] = Modules(self.arch, dtype)
        kernel = self._modules[dtype].kernel(file, name, constants)

        def call(grid: Any, block: Any, *args: Any, smem: int = 0, pdl: bool = False, cluster: Any = None) -> None:
            launch(self.stream, kernel, grid, block, smem, args, pdl=pdl, cluster=cluster)

        return call

    def array(self, values: Any, dtype: DType | None = None) -> Any:
        """A device copy: float32 rounded to the storage words of `dtype`, or the array as it is if that is None."""
        values = np.asarray(values)
        words = values if dtype is None else from_float32(values.astype(np.float32, copy=False), dtype)
        with self.stream:
            device_array = self.cupy.asarray(np.ascontiguousarray(words))
        self.stream.synchronize()
        return device_array

    def numpy(self, device_array: Any, dtype: DType | None = None) -> np.ndarray[Any, Any]:
        """A host copy, after everything launched so far: float32 from words of `dtype`, or as it is."""
        self.sync()
        words = self.cupy.asnumpy(device_array)
        return words if dtype is None else to_float32(words, dtype)

    def sync(self) -> None:
        """Wait for every launch; raises what a kernel did wrong."""
        self.stream.synchronize()


@pytest.fixture(scope="session")
def cuda() -> Cuda:
    """Only for tests marked `gpu`."""
    return Cuda()
