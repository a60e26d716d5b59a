"""The tensors of a model as data: weights, with the checkpoint tensors they are packed from, and workspace buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from cpmrt.dtypes import DType, ElementType

Product = Literal["qkv", "residual", "gate_up", "head", "per_head"]
"""The product that a matrix takes part in: its kernel, the order of its rows, and so its packed layout.

The small products of "per_head", one for each head of latent attention, take a matrix in 16 bits: one that a checkpoint
holds quantised is turned into 16 bits while it is loaded.
"""

PLAIN_HEAD_DIM = 16
"""The `head_dim` of a "qkv" product whose rows are not those of heads: with it they are stored in their own order."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint holds a quantised matrix [N, K]: as several tensors, whose layout `format` names.

    `format` is a row of `weights.formats.FORMATS`. `group_size` in columns (K where one group is a whole row);
    `symmetric`: every zero point is 8; `permuted`: the columns of a group are not neighbours; `v1_zeros`: zero points
    are stored minus one. With `row_bytes` it is one tensor of blocks of GGUF instead, so many bytes a row, and `format`
    is a row of `weights.formats.blocks.BLOCK_TYPES`.
    """

    format: str
    group_size: int
    symmetric: bool
    permuted: bool = False
    v1_zeros: bool = False
    row_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Quantization:
    """How an executor holds a quantised weight [N, K]: codes of `bits` bits (2 where it is ternary, 4, or 8), a scale
    for every `group_size` columns, zero points unless `symmetric`, the order of the columns if `permuted`. `in_blocks`:
    it is held as the GGUF blocks of its sources, each source with its own block type."""

    bits: int
    group_size: int
    symmetric: bool = True
    permuted: bool = False
    in_blocks: bool = False

    @property
    def zero(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << self.bits - 1


SCREEN = Quantization(8, 128)
"""The form of the 8-bit copy that screens an output head in 16 bits."""

HEAD_COPY = "head copy"
"""The row of that copy in the table of the memory plan."""


@dataclass(frozen=True, slots=True)
class Source:
    """One matrix or vector of the checkpoint: its shape, and the Hugging Face name of its tensor.

    With a `packing` it is quantised; `name` is then that of the module, the common beginning of its tensors (in blocks
    that of its tensor). With `rows` it is these rows of a matrix in 16 bits or in blocks, in this order.
    """

    name: str
    shape: tuple[int, ...]
    packing: Packing | None = None
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A weight as the executor holds it: the row-wise concatenation of `sources` (usually one).

    Without a `quant` it is held in 16 bits, whatever its sources are; with one, sources in 16 bits are rounded to it.
    `product` is None for vectors, an embedding and a router, which are never quantised. `head_dim` is the number of
    rows of a head, whose two halves RoPE pairs, if the rows are those of heads. `part` is the weight's row in the table
    of the memory plan. `num_experts` is the number of matrices of equal shape that are stacked in the weight, of which
    a token takes some; a "gate_up" product has the gates of all experts, then the ups of all. With `mapped_as` the
    weight is not in the arena: the executor reads its one source, which is stored in this type, from the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    quant: Quantization | None = None
    product: Product | None = None
    head_dim: int = 0
    part: str = "layers"
    num_experts: int = 0
    mapped_as: DType | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def parts(self) -> Iterator[tuple[Source, slice]]:
        """Yield each source with the rows of the weight that it fills."""
        first = 0
        for source in self.sources:
            yield source, slice(first, first + source.shape[0])
            first += source.shape[0]

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of the weight, its scales and zero points; 16-bit elements and scales have `itemsize`."""
        if self.quant is None:
            return self.num_elements * (self.mapped_as.itemsize if self.mapped_as else itemsize)
        if self.quant.in_blocks:
            return sum(source.shape[0] * source.packing.row_bytes for source in self.sources if source.packing)
        num_groups = self.num_elements // self.quant.group_size
        zeros = 0 if self.quant.symmetric else num_groups // 2
        return self.num_elements * self.quant.bits // 8 + num_groups * itemsize + zeros


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A workspace buffer of one forward pass.

    It is live from the phase `first` to the phase `last`, both included: buffers whose lifetimes do not meet may
    share memory. `dtype` None means the executor's type of activations: words of 16 bits, or float32. `part` is the row
    of a buffer that lives as long as the executor in the table of the memory plan. A `zeroed` buffer is zero before the
    first step: kernels count in it, or read it before they have written it.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    last: int
    dtype: ElementType | None = None
    part: str = "tables"
    zeroed: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)
