"""Writes a safetensors file tensor by tensor, in any order, without holding it in memory.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from cpmrt.dtypes import Array
from cpmrt.quantization.planned_file import PlannedFile
from cpmrt.weights.safetensors import encoded_header

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written: its safetensors type (a key of `ITEM_BYTES`) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsWriter(PlannedFile):
    """A new file with room for every tensor of `tensors`; each must be written once before the `with` block ends."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorPlan]):
        self._tensors, places, end = dict(tensors), dict[str, int](), 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        # Wide types first: every tensor is then aligned to its type.
        for name in sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name)):
            plan = tensors[name]
            header[name] = {
                "dtype": plan.dtype, "shape": list(plan.shape), "data_offsets": [end, end + plan.nbytes],
            }  # fmt: skip
            places[name] = end
            end += plan.nbytes
        super().__init__(path, encoded_header(header), places, end)

    def write(self, name: str, words: Array) -> None:
        """Fill a tensor with an array of its shape and item size (bfloat16 as its words)."""
        plan = self._tensors[name]
        if words.shape != plan.shape or words.itemsize != ITEM_BYTES[plan.dtype]:
            raise ValueError(f"{name}: planned {plan}, got {words.dtype} {words.shape}")
        self._fill(name, words)
