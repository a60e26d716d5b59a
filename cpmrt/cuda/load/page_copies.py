"""Copies KV pages between the arena and the host, through page-locked memory, in the order of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.host_memory import HostBuffer
from cpmrt.dtypes import Array

if TYPE_CHECKING:
    from cupy.cuda import Stream


def read_pages(arrays: Mapping[str, DeviceArray], pages: Sequence[int], stream: Stream) -> dict[str, Array]:
    """Return these pages of device arrays [layers, all pages, ...] as host arrays [layers, pages, ...]."""
    from cupy.cuda import runtime

    with HostBuffer(_num_bytes(arrays, pages)) as buffer:
        for copy in _copies(arrays, pages, buffer.address):
            runtime.memcpy2DAsync(*copy.host, *copy.device, *copy.extent, runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()
        return {name: view.copy() for name, view in _views(arrays, pages, buffer).items()}


def write_pages(
    arrays: Mapping[str, DeviceArray], pages: Sequence[int], contents: Mapping[str, Array], stream: Stream
) -> None:
    """Fill these pages of device arrays with host arrays [layers, pages, ...]; returns when the copies are done."""
    from cupy.cuda import runtime

    with HostBuffer(_num_bytes(arrays, pages)) as buffer:
        for name, view in _views(arrays, pages, buffer).items():
            view[:] = contents[name]
        for copy in _copies(arrays, pages, buffer.address):
            runtime.memcpy2DAsync(*copy.device, *copy.host, *copy.extent, runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()


class _Copy:
    """The copy of one page in all layers.

    `host` and `device` are an address and the bytes from a layer to the next; `extent` is (bytes of a page, layers).
    """

    def __init__(self, array: DeviceArray, page: int, host: int, host_step: int):
        page_bytes = array[0, 0].nbytes
        self.host = host, host_step
        self.device = array.data.ptr + page * page_bytes, array[0].nbytes
        self.extent = page_bytes, len(array)


def _copies(arrays: Mapping[str, DeviceArray], pages: Sequence[int], address: int) -> Iterator[_Copy]:
    for array in arrays.values():
        page_bytes = array[0, 0].nbytes
        for index, page in enumerate(pages):
            yield _Copy(array, page, address + index * page_bytes, len(pages) * page_bytes)
        address += len(array) * len(pages) * page_bytes


def _num_bytes(arrays: Mapping[str, DeviceArray], pages: Sequence[int]) -> int:
    return sum(len(array) * len(pages) * array[0, 0].nbytes for array in arrays.values())


def _views(arrays: Mapping[str, DeviceArray], pages: Sequence[int], buffer: HostBuffer) -> dict[str, Array]:
    """Return the part of the buffer that belongs to each array, in the order of `_copies`."""
    raw, start, found = buffer.array(np.uint8), 0, {}
    for name, array in arrays.items():
        end = start + len(array) * len(pages) * array[0, 0].nbytes
        found[name] = raw[start:end].view(array.dtype).reshape(len(array), len(pages), *array.shape[2:])
        start = end
    return found
