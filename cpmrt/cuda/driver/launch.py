"""Launching a kernel on a stream: eager or under capture, with dependent-launch edges and clusters.

The launch goes through the driver's cuLaunchKernelEx, because CuPy's own takes no launch attributes. Under capture it
becomes a node of the graph, whichever side began the capture: a CuPy stream or a cuda.core GraphBuilder.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from cpmrt.cuda.driver.device import LOST_CONTEXT
from cpmrt.errors import CpmrtError, DeviceError

Dimensions = int | tuple[int, ...]

# Dynamic shared memory above this needs a function attribute.
_PLAIN_SHARED_BYTES = 48 * 1024
_ARGUMENT_BYTES = 8
_MOST_SHARED = 100  # per cent


class CudaStream(Protocol):
    """A CuPy or cuda.core stream, or a cuda.core GraphBuilder."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class Kernel:
    """A function of a loaded module: `handle` is its CUfunction, `raw` the CuPy kernel that keeps the module alive.

    `has_pdl` says whether it was compiled for an architecture with programmatic dependent launch.
    """

    __slots__ = ("_prefers_shared", "_shared_bytes", "handle", "has_pdl", "name", "raw")

    def __init__(self, name: str, handle: int, raw: Any, has_pdl: bool):
        self.name, self.handle, self.raw, self.has_pdl = name, handle, raw, has_pdl
        self._shared_bytes, self._prefers_shared = _PLAIN_SHARED_BYTES, False

    def allow_shared_bytes(self, num_bytes: int) -> None:
        """Raise the limit of dynamic shared memory a block; the driver refuses what the device does not have."""
        if num_bytes > self._shared_bytes:
            self.raw.max_dynamic_shared_size_bytes = num_bytes
            self._shared_bytes = num_bytes

    def prefer_shared(self) -> None:
        """Multiprocessors that run it are to be all shared memory and as little L1 as they can.

        A multiprocessor changes its split only while it is idle: a block that wants another one than the blocks of the
        kernel before it waits for their end, and what the driver chooses changes with a kernel's registers.
        """
        if not self._prefers_shared:
            self.raw.preferred_shared_memory_carveout = _MOST_SHARED
            self._prefers_shared = True


def launch(
    stream: CudaStream,
    kernel: Kernel,
    grid: Dimensions,
    block: Dimensions,
    smem: int,
    args: Sequence[Any],
    *,
    pdl: bool = False,
    cluster: Dimensions | None = None,
    prefers_shared: bool = False,
) -> None:
    """Launch `kernel` with `grid` blocks (not clusters) of `block` threads and `smem` bytes of dynamic shared memory.

    `args` are device arrays, NumPy scalars of the parameter's exact type (np.void for a struct such as a tensor map),
    or None for a null pointer. `pdl` lets the kernel start while the one before it finishes; it is ignored below sm_90,
    where `cluster` is refused. `prefers_shared`: as `Kernel.prefer_shared`, from this launch on. Nothing is waited for.
    Raises CpmrtError if the driver refuses the launch, DeviceError if a fault came before it.
    """
    from cuda.bindings import driver

    kernel.allow_shared_bytes(smem)
    if prefers_shared:
        kernel.prefer_shared()
    overlap = pdl and kernel.has_pdl
    config = _launch_config(stream.__cuda_stream__()[1], _three(grid), _three(block), smem, overlap, cluster)
    parameters = Parameters(args)
    (status,) = driver.cuLaunchKernelEx(config, kernel.handle, parameters.address, 0)
    if int(status):
        shape = f"grid {grid}, block {block}, {smem} bytes of shared memory"
        kind = DeviceError if int(status) in LOST_CONTEXT else CpmrtError
        raise kind(f"the launch of {kernel.name} fails ({shape})", actual=f"{status.name} ({int(status)})")


class Parameters:
    """Kernel parameters as the driver takes them: an array of pointers to the values. The launch copies the values."""

    __slots__ = ("_pointers", "_values")

    def __init__(self, args: Sequence[Any]):
        values = [_bytes_of(argument).ljust(_ARGUMENT_BYTES, b"\0") for argument in args]
        ends = list(accumulate(map(len, values), initial=0))
        self._values = ctypes.create_string_buffer(b"".join(values), ends[-1] or 1)
        start = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(args))(*[start + end for end in ends[:-1]])

    @property
    def address(self) -> int:
        """Of the array of pointers; valid as long as this object."""
        return ctypes.addressof(self._pointers)


def _bytes_of(argument: Any) -> bytes:
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if argument is None:
        return bytes(_ARGUMENT_BYTES)
    if hasattr(argument, "data") and hasattr(argument.data, "ptr"):
        return struct.pack("=Q", argument.data.ptr)
    # A bare int or float would have to guess the width of the parameter.
    raise TypeError(f"a kernel takes device arrays and NumPy scalars, not {type(argument).__name__}")


def _three(dimensions: Dimensions) -> tuple[int, int, int]:
    sizes = (dimensions,) if isinstance(dimensions, int) else tuple(dimensions)
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


@functools.lru_cache(maxsize=4096)
def _launch_config(
    stream: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem: int,
    pdl: bool,
    cluster: Dimensions | None,
) -> Any:
    """A CUlaunchConfig; building one costs more than the launch, and a step repeats the same few."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem
    config.hStream = stream
    attributes = []
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster is not None:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = _three(cluster)
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
