"""Describes a file format of quantised matrices: its tensors, and both ways between them and plain numbers.

Plain are codes u [N, K] and zero points z [N, groups], uint8 of 0..15 (of 0..255 in 8 bits), and float scales
[N, groups]; N = output features (rows), K = input features (columns), in the file's order. W[n, k] = scale[n, g] *
(u[n, k] - z[n, g]) with g = k // group_size, or g_idx[k] where the file has one. Packing only moves bits: nothing is
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
    """A tensor that a checkpoint must have, or may have, with one of these types."""

    name: str
    dtypes: tuple[str, ...]
    shape: Shape
    required: bool = True

    def fault(self, entry: TensorEntry) -> str | None:
        """Say what is wrong with the file's tensor, or None."""
        if entry.dtype not in self.dtypes:
            return f"(expected {' | '.join(self.dtypes)}, got {entry.dtype})"
        if entry.shape != self.shape:
            return f"(expected {list(self.shape)}, got {quoted(list(entry.shape))})"
        return None


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix. Its name ends in `suffix`; `shape` is for N, K and so many groups a row.

    `pack` makes the tensor of plain numbers [N, ..]; `unpack` is the inverse. `dtypes` are the types it may have.
    """

    suffix: str
    shape: Callable[[int, int, int], Shape]
    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]
    dtypes: tuple[str, ...] = ("I32",)

    def of(self, module: str) -> str:
        """Return the tensor's name."""
        return f"{module}.{self.suffix}"


@dataclass(frozen=True)
class Format:
    """One file format, a row of `FORMATS`.

    `number` is what `repack.cu` calls it. `rows(words, begin, end)` are the words of the codes of these rows.
    """

    name: str
    number: int
    codes: Part
    rows: Callable[[I32, int, int], I32]
    scales: Part
    zeros: Part | None = None
    """None: all zero points are 8."""
    zeros_if_symmetric: bool = True
    """Whether the zero points are there where all of them are 8."""
    order: str = ""
    """Suffix of the tensor that names each column's group, where there may be one."""
    blank_order: bool = False
    """An order of -1 everywhere is none."""
    shape: str = ""
    """Suffix of a tensor that holds N and K."""
    row_step: int = 8
    column_step: int = 8
    """N is a multiple of `row_step`, K of `column_step`."""
    settings: str = ""
    """`WeightQuantization.packing` of its checkpoints, where that is another format's name."""
    bits: int = 4
    """The bits of a code, and of a zero point."""
    is_meant: Callable[[str, Shape, Entries], bool] = lambda module, shape, entries: True
    """Whether the tensors of a module [N, K] are in this format, where the settings leave that open."""

    @property
    def zero(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << self.bits - 1

    def tensors(self, module: str, shape: Shape, packing: Packing) -> Iterator[StoredTensor]:
        """Yield what a checkpoint must or may have of a matrix [N, K]."""
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
    """Turn [N, groups] into [groups, N], and back."""
    return np.ascontiguousarray(values.T)
