"""Writes a file of tensors whose places are known in advance, tensor by tensor in any order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from cpmrt.dtypes import Array

W = TypeVar("W", bound="PlannedFile")


class PlannedFile:
    """A new file: a head, then room for `nbytes` bytes of tensors, each of which begins at its place in `places`.

    Each tensor must be filled once before the `with` block ends.
    """

    def __init__(self, path: Path, head: bytes, places: Mapping[str, int], nbytes: int):
        self._start, self._places = len(head), dict(places)
        self._file = path.open("xb")
        self._file.write(head)
        self._file.truncate(self._start + nbytes)

    def _fill(self, name: str, words: Array) -> None:
        self._file.seek(self._start + self._places.pop(name))
        self._file.write(np.ascontiguousarray(words).reshape(-1).view(np.uint8).data)

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if error is None and self._places:
            raise ValueError(f"tensors that were never written: {sorted(self._places)[:5]}")
