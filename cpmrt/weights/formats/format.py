"""Describes a file format of quantised matrices: its tensors, and how plain numbers are packed into them and back.

The plain numbers are codes u [N, K] and zero points z [N, groups], uint8 of 0..15 (of 0..255 in 8 bits), and float
scales [N, groups]; N = output features (rows), K = input features (columns), in the file's order. W[n, k] = scale[n, g]
* (u[n, k] - z[n, g]) with g = k // group_size, or g_idx[k] where the file has one. Packing only moves bits: nothing is
rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpmrt.dtypes import Array
from cpmrt.errors import quoted
from cpmrt.tensor_spec import Packing
from cpmrt.weights.mapped_file import TensorEntry
from cpmrt.weights.safetensors import FLOATS

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
Shape = tuple[int, ...]
Entries = Mapping[str, TensorEntry]
SCALES = tuple(FLOATS)
"""The types that scales may have."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a checkpoint must have, or may have (`required` False), with one of the types `dtypes`."""

    name: str
    dtypes: tuple[str, ...]
    shape: Shape
    required: bool = True

    def fault(self, entry: TensorEntry) -> str | None:
        """Return what is wrong with the type or shape of the file's tensor, or None."""
        if entry.dtype not in self.dtypes:
            return f"(expected {' | '.join(self.dtypes)}, got {entry.dtype})"
        if entry.shape != self.shape:
            return f"(expected {list(self.shape)}, got {quoted(list(entry.shape))})"
        return None


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix. Its name ends in `suffix`; `shape(N, K, groups of a row)` is its shape.

    `pack` makes it from plain numbers [N, ..]; `unpack` is the inverse. `dtypes` are the types that it may have.
    """

    suffix: str
    shape: Callable[[int, int, int], Shape]
    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]
    dtypes: tuple[str, ...] = ("I32",)

    def of(self, module: str) -> str:
        """Return the name of this tensor of a module."""
        return f"{module}.{self.suffix}"


@dataclass(frozen=True)
class Format:
    """One file format, a row of `FORMATS`.

    `number` is its number in `repack.cu`. `rows(words, begin, end)` returns the words that hold the codes of rows
    `begin` to `end`.
    """

    name: str
    number: int
    codes: Part
    rows: Callable[[I32, int, int], I32]
    scales: Part
    zeros: Part | None = None
    """The tensor of zero points; None where the format has none: all are 8."""
    zeros_if_symmetric: bool = True
    """Whether the file has the tensor of zero points also where all of them are 8."""
    order: str = ""
    """Suffix of the optional tensor that names each column's group; empty where the format has none."""
    blank_order: bool = False
    """Whether an order tensor that is -1 everywhere counts as absent."""
    shape: str = ""
    """Suffix of the optional tensor that holds N and K; empty where the format has none."""
    row_step: int = 8
    column_step: int = 8
    """N is a multiple of `row_step`, K of `column_step`."""
    settings: str = ""
    """The `WeightQuantization.packing` of its checkpoints where that is another format's name; empty: `name`."""
    bits: int = 4
    """The bits of a code, and of a zero point."""
    is_meant: Callable[[str, Shape, Entries], bool] = lambda module, shape, entries: True
    """Whether the tensors of a module [N, K] are in this format, where the settings leave that open."""

    @property
    def zero(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << self.bits - 1

    def tensors(self, module: str, shape: Shape, packing: Packing) -> Iterator[StoredTensor]:
        """Yield the tensors that a checkpoint must or may have for a matrix [N, K]."""
        num_rows, num_columns = shape
        sizes = num_rows, num_columns, num_columns // packing.group_size
        has_zeros = self.zeros_if_symmetric or not packing.symmetric
        for part in (self.codes, self.scales, self.zeros if has_zeros else None):
            if part is not None:
                yield StoredTensor(part.of(module), part.dtypes, part.shape(*sizes))
        if self.order:
            yield StoredTensor(f"{module}.{self.order}", ("I32",), (num_columns,), required=False)
        if self.shape:
            yield StoredTensor(f"{module}.{self.shape}", ("I32", "I64"), (2,), required=False)


def pack_nibbles(values: U8) -> I32:
    """Pack uint8 [..., 8 n] with values 0..15 to int32 words [..., n], the first of eight in the low bits."""
    pairs = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    return np.ascontiguousarray(pairs).view("<i4").astype(np.int32, copy=False)


def unpack_nibbles(words: I32) -> U8:
    """Unpack int32 words [..., n] to uint8 [..., 8 n]: the inverse of `pack_nibbles`."""
    pairs = np.ascontiguousarray(words, "<i4").view(np.uint8)
    out = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]), np.uint8)
    np.bitwise_and(pairs, 15, out=out[..., 0::2])
    np.right_shift(pairs, 4, out=out[..., 1::2])
    return out


def transposed(values: Array) -> Array:
    """Return a contiguous copy of the transpose: [groups, N] of [N, groups], and back."""
    return np.ascontiguousarray(values.T)
