"""Writes a GGUF file (version 3): its keys, then tensor after tensor in any order, without holding it in memory.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from cpmrt.dtypes import Array
from cpmrt.quantization.planned_file import PlannedFile
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.gguf.header import ARRAY, BOOL, DEFAULT_ALIGNMENT, FLOAT32, FLOAT_NUMBERS, INT32, STRING, UINT32

_FLOATS = {dtype.safetensors_name: (number, dtype) for number, dtype in FLOAT_NUMBERS.items()}


@dataclass(frozen=True)
class Typed:
    """A number, or a list of numbers, and its type in the file."""

    kind: Literal["u32", "i32", "f32"]
    value: int | float | Sequence[int] | Sequence[float]


KeyValue = str | bool | Sequence[str] | Typed
_KINDS = {"u32": (UINT32, "I"), "i32": (INT32, "i"), "f32": (FLOAT32, "f")}


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written: its type by name, and its shape from the outermost dimension on."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def number(self) -> int:
        return _FLOATS[self.dtype][0] if self.dtype in _FLOATS else BLOCK_TYPES[self.dtype].number

    @property
    def nbytes(self) -> int:
        if self.dtype in _FLOATS:
            return prod(self.shape) * _FLOATS[self.dtype][1].itemsize
        return prod(self.shape[:-1]) * BLOCK_TYPES[self.dtype].row_bytes(self.shape[-1])


class GgufWriter(PlannedFile):
    """A new file with room for every tensor of `tensors`; each must be written once before the `with` block ends."""

    def __init__(self, path: Path, keys: Mapping[str, KeyValue], tensors: Mapping[str, TensorPlan]):
        self._tensors, places, end = dict(tensors), dict[str, int](), 0
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
        head += b"".join(_string(key) + _value(value) for key, value in keys.items())
        for name, plan in tensors.items():
            dims = struct.pack(f"<I{len(plan.shape)}Q", len(plan.shape), *plan.shape[::-1])
            head += _string(name) + dims + struct.pack("<IQ", plan.number, end)
            places[name] = end
            end += _aligned(plan.nbytes)
        super().__init__(path, head.ljust(_aligned(len(head)), b"\0"), places, end)

    def write(self, name: str, words: Array) -> None:
        """Fill a tensor with its words of a float type, or with its blocks as bytes."""
        plan = self._tensors[name]
        if words.nbytes != plan.nbytes:
            raise ValueError(f"{name}: planned {plan}, got {words.dtype} {words.shape}")
        self._fill(name, words)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: KeyValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if not isinstance(value, Typed):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    number, code = _KINDS[value.kind]
    if isinstance(value.value, Sequence):
        items = value.value
        return struct.pack("<IIQ", ARRAY, number, len(items)) + struct.pack(f"<{len(items)}{code}", *items)
    return struct.pack(f"<I{code}", number, value.value)
