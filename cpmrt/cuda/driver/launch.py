"""Launches a kernel on a stream, eagerly or under capture, with dependent-launch edges.

The launch goes through the driver's cuLaunchKernelEx, because CuPy's own takes no launch attributes. Under capture it
becomes a node of the graph, whichever side began the capture: a CuPy stream or a cuda.core GraphBuilder.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cpmrt.cuda.driver.array import KernelArgument
from cpmrt.cuda.driver.faults import LOST_CONTEXT
from cpmrt.errors import CpmrtError, DeviceError

if TYPE_CHECKING:
    from cuda.bindings import driver
    from cupy import RawKernel

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

    def __init__(self, name: str, handle: int, raw: RawKernel, has_pdl: bool):
        self.name, self.handle, self.raw, self.has_pdl = name, handle, raw, has_pdl
        self._shared_bytes, self._prefers_shared = _PLAIN_SHARED_BYTES, False

    def allow_shared_bytes(self, num_bytes: int) -> None:
        """Raise the limit of a block's dynamic shared memory; the driver refuses what the device does not have."""
        if num_bytes > self._shared_bytes:
            self.raw.max_dynamic_shared_size_bytes = num_bytes
            self._shared_bytes = num_bytes

    def prefer_shared(self) -> None:
        """Ask for multiprocessors with as much shared memory and as little L1 as they can have.

        A multiprocessor changes its split only while it is idle: a block that wants another one than the blocks of the
        kernel before it waits for their end, and what the driver chooses changes with a kernel's registers.
        """
        if not self._prefers_shared:
            self.raw.preferred_shared_memory_carveout = _MOST_SHARED
            self._prefers_shared = True


def allow_wide_clusters(function: driver.CUfunction | int) -> None:
    """Let a kernel have clusters of more than eight blocks, where the device has them."""
    from cuda.bindings import driver

    allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    driver.cuFuncSetAttribute(function, allowed, 1)


def launch(
    stream: CudaStream,
    kernel: Kernel,
    grid: Dimensions,
    block: Dimensions,
    smem: int,
    args: Sequence[KernelArgument],
    *,
    pdl: bool = False,
    prefers_shared: bool = False,
) -> None:
    """Launch `kernel` with `grid` blocks (not clusters) of `block` threads and `smem` bytes of dynamic shared memory.

    `pdl` lets the kernel start while the one before it finishes; it is ignored below sm_90. `prefers_shared`: as
    `Kernel.prefer_shared`, from this launch on. Nothing is waited for. Raises CpmrtError if the driver refuses the
    launch, DeviceError if a fault came before it.
    """
    from cuda.bindings import driver

    kernel.allow_shared_bytes(smem)
    if prefers_shared:
        kernel.prefer_shared()
    overlap = pdl and kernel.has_pdl
    config = launch_config(stream.__cuda_stream__()[1], three(grid), three(block), smem, overlap)
    parameters = Parameters(args)
    (status,) = driver.cuLaunchKernelEx(config, kernel.handle, parameters.address, 0)
    if int(status):
        shape = f"grid {grid}, block {block}, {smem} bytes of shared memory"
        kind = DeviceError if int(status) in LOST_CONTEXT else CpmrtError
        raise kind(f"the launch of {kernel.name} fails ({shape})", actual=f"{status.name} ({int(status)})")


class Parameters:
    """Kernel parameters as the driver takes them: an array of pointers to the values. The launch copies the values."""

    __slots__ = ("_pointers", "_values")

    def __init__(self, args: Sequence[KernelArgument]):
        values = [_bytes_of(argument).ljust(_ARGUMENT_BYTES, b"\0") for argument in args]
        ends = list(accumulate(map(len, values), initial=0))
        self._values = ctypes.create_string_buffer(b"".join(values), ends[-1] or 1)
        start = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(args))(*[start + end for end in ends[:-1]])

    @property
    def address(self) -> int:
        """The address of the array of pointers; valid as long as this object."""
        return ctypes.addressof(self._pointers)


def _bytes_of(argument: KernelArgument) -> bytes:
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if argument is None:
        return bytes(_ARGUMENT_BYTES)
    pointer = getattr(getattr(argument, "data", None), "ptr", None)
    if pointer is not None:
        return struct.pack("=Q", pointer)
    # A bare int or float would have to guess the width of the parameter.
    raise TypeError(f"a kernel takes device arrays and NumPy scalars, not {type(argument).__name__}")


def three(dimensions: Dimensions) -> tuple[int, int, int]:
    """Return the extents in x, y and z."""
    sizes = (dimensions,) if isinstance(dimensions, int) else tuple(dimensions)
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


@functools.lru_cache(maxsize=4096)
def launch_config(
    stream: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem: int,
    pdl: bool = False,
    cluster: tuple[int, int, int] | None = None,
) -> driver.CUlaunchConfig:
    """Return the configuration of a launch, from a cache: building one costs more than the launch, and few differ.

    `cluster`: blocks of a cluster, for a kernel that does not say so itself.
    """
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
        size.x, size.y, size.z = cluster
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
