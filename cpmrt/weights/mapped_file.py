"""Reads the tensors of a file through a memory map: no byte of them is touched before it is asked for."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from cpmrt.dtypes import Array
from cpmrt.errors import CheckpointError, quoted

F = TypeVar("F", bound="MappedFile")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of one tensor: `nbytes` bytes, row-major, at `offset` from the beginning of the file `path`."""

    name: str
    dtype: str
    """The format's name: "BF16", "F32", "I64", ..."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False, slots=True)
class MappedFile:
    """An open and mapped file with the places of its tensors. Closes at the end of a `with` block."""

    path: Path
    entries: Mapping[str, TensorEntry]
    _map: mmap.mmap

    def bytes_of(self, name: str) -> tuple[TensorEntry, Array]:
        """Return where a tensor lies, and its bytes as a read-only array over the mapped file: no copy.

        Raises CheckpointError if there is no such tensor or the file is closed.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {quoted(name)}")
        if self._map.closed:
            raise CheckpointError(f"{self.path} is closed")
        # frombuffer, unlike ndarray(buffer=...), keeps the map from being closed under a living array.
        return entry, np.frombuffer(self._map, dtype=np.uint8, count=entry.nbytes, offset=entry.offset)

    def release(self) -> None:
        """Give the memory of the bytes read so far back to the system; views stay valid and read them again."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file; while arrays view it, the last of them unmaps it. May be called again."""
        unmap(self._map)

    def __enter__(self: F) -> F:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def map_file(file: BinaryIO, path: Path, size: int) -> mmap.mmap:
    """Map an open file of `size` bytes. Raises CheckpointError."""
    try:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be mapped: {error}") from error


def unmap(mapped: mmap.mmap) -> None:
    """Close a map; while arrays view it, the last of them closes it."""
    try:
        mapped.close()
    except BufferError:
        return
