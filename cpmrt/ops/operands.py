"""The operands of a layer's ops, as typed groups of arrays: rows, weights, pages, choices of blocks.

The arrays are of the executor's own kind (NumPy or CuPy); shapes are in `ops/spec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from cpmrt.config import SparseConfig
from cpmrt.dtypes import DType

FP8_LARGEST = 448.0
FP8_HEADROOM = 64
"""The factor by which a token may be larger than the first one of its fp8 page without being cut off. It is so large
because attention sinks, such as the first token of a sequence, have values many times smaller than other tokens."""
FP8_SCALE_EXPONENTS = (-8, 7)
"""Exponents of the smallest and the largest scale: 2^-8 represents all of fp8 up to 1.75, 2^7 all that fp16 holds."""


WINDOW_STRIDE = 16
"""Tokens between the ends of two windows of compressed keys: one ends at position p where p + 1 is a multiple of it."""
SHORT_KEYS = 2048
"""The most keys of a short row, whose attention other kernels may compute than a long one's, with the same result."""
RowLength = Literal["short", "long"]
"""The length of a row: "short" if it sees at most SHORT_KEYS keys, "long" if it sees more."""


@dataclass(frozen=True, slots=True)
class RowKind:
    """The host's knowledge of the rows of a decode step. It decides which kernels are launched, but changes no result.
    """

    length: RowLength | None = None
    """The length of every row; None: it is not known, or rows differ."""
    is_inside: bool = False
    """Whether no window of compressed keys ends at a row's position (`WINDOW_STRIDE`), so that none is stored."""
    is_dense: bool = False
    """Whether every row sees so few keys that it does not choose among blocks."""

    def __str__(self) -> str:
        """Return the known facts in words; an empty string where nothing is known."""
        words = (self.length, "inside" if self.is_inside else None, "dense" if self.is_dense else None)
        return " ".join(filter(None, words))


ANY_ROWS = RowKind()
"""The kind of rows of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step: token, position and slot of each, and the block tables that map a slot to pages.

    In a prefill all rows belong to one slot and positions are consecutive; in a decode each row stands alone.

    A row of a draft tree has its keys and values at `locations[t]` of the slot's pages (None: at its position), since
    siblings share a position. It looks at positions 0 .. tree_base[t] - 1, and then, as positions tree_base[t] and
    on, at the locations tree_base[t] + i for every set bit i of tree_masks[t] in ascending order, its own the last of
    them: positions[t] = tree_base[t] + set bits - 1. So it sees its path in the order in which plain decoding would,
    and its results have the same bits.
    """

    token_ids: Any
    positions: Any
    slots: Any
    block_tables: Any
    is_prefill: bool
    locations: Any = None
    """int32 [T]"""
    tree_masks: Any = None
    """uint64 [T], or None where no row is of a tree; then `tree_base` is None too."""
    tree_base: Any = None
    """int32 [T]"""
    reach: Any = None
    """int32 [T], the last position that each row of a DSpark block looks at, which may lie behind its own; None: its
    own."""
    kind: RowKind = field(default=ANY_ROWS, kw_only=True)

    def of_attention(self) -> Rows:
        """Return the rows for attention, which takes the last position that a row looks at (`reach`) for its own."""
        return self if self.reach is None else replace(self, positions=self.reach)


@dataclass(frozen=True, eq=False, slots=True)
class QuantizedWeight:
    """A matrix [N, K] as codes and scales in the NumPy executor's canonical layout (`weights.quantised`).

    W[n, perm[k]] = scales[n, k // group_size] * (codes[n, k] - zeros[n, k // group_size]). Codes are 0..15; `zeros`
    None: 8 everywhere; `perm` None: k itself. With `bits` 2 codes are 0..3 and the zero point is 2; with 8 codes are
    -127..127 and the zero point is 0.
    """

    codes: Any
    scales: Any
    zeros: Any | None
    perm: Any | None
    shape: tuple[int, int]
    group_size: int
    bits: int = 4

    @property
    def size(self) -> int:
        """The number of elements of the matrix."""
        return prod(self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class BlockWeight:
    """A matrix [N, K] in blocks of GGUF, as the NumPy executor holds it: `parts` of its rows, one after another. A part
    is the name of a block type of `weights.formats.blocks`, and the rows, uint8 [rows, bytes of a row]."""

    parts: tuple[tuple[str, Any], ...]
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        """The number of elements of the matrix."""
        return prod(self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class MappedWeight:
    """A matrix [N, K] in a mapped file, as the NumPy executor reads it: words of the storage type `dtype`."""

    words: Any
    dtype: DType

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the matrix."""
        num_rows, num_columns = self.words.shape
        return num_rows, num_columns

    @property
    def size(self) -> int:
        """The number of elements of the matrix."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class QkvWeights:
    """The weights of the fused q, k and v projection: the RMSNorm before it (None: the rows are normalised already),
    the matrix, its bias, and the RMSNorms of each query and key head."""

    norm: Any | None
    weight: Any
    bias: Any | None = None
    q_norm: Any | None = None
    k_norm: Any | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of latent attention between its projections: the RMSNorms of the queries' latent [A] and of the
    latent [C] of keys and values, and `up` [H, N + U, C]. The latter are the matrices that make each head's key (the
    first N rows) and value of the latent of keys and values."""

    q_norm: Any
    kv_norm: Any
    up: Any


@dataclass(frozen=True, eq=False, slots=True)
class Fp8Pages:
    """Keys or values in 8 bits: `codes` uint8 [P, K, 64, D], `scales` float32 [P, K].

    An element is an e4m3 code (OCP 8-bit floating point, the variant without infinities) times the scale of its page
    and KV head, a power of two. The page's first token alone decides the scale, before any other is stored: how tokens
    are grouped into steps changes no bit, and nothing is ever rewritten. By this scale the first token's largest
    magnitude is at most 448 / FP8_HEADROOM; an element of a later token beyond 448 becomes 448. e4m3 is a
    floating-point type, so the headroom costs no precision: three bits of mantissa are kept down to
    1 / (2^6 * 448 / FP8_HEADROOM) of that magnitude.

    Nodes of a draft tree cannot go to pages, whose scales other tokens have decided. Until they are accepted, `nodes`
    uint8 [N, K, D] has their codes and `node_scales` float32 [N, K] their scales: a node's is the one that the page of
    its position would have if its path were stored. Both are None where nothing drafts.
    """

    codes: Any
    scales: Any
    nodes: Any = None
    node_scales: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the elements."""
        return tuple(self.codes.shape)


@dataclass(frozen=True, slots=True)
class CompressedKeys:
    """Compressed keys of one layer, each in the page in which its window ends: a full page depends on its prefix only.

    k1 [P, K, 4, D]: row r of a sequence's page b is the mean of the keys of positions 64 b + 16 r - 16 ..
    64 b + 16 r + 15. k2 [P, K, D]: the mean of 64 b - 64 .. 64 b + 63. Rows whose window would begin before the text
    (row 0 of the first page in both) or has not ended yet are undefined.

    With `use_nope` the windows are over keys before RoPE, which `nope` [P, K, S, D] holds; else it is None.
    """

    k1: Any
    k2: Any
    nope: Any = None


@dataclass(frozen=True, slots=True)
class KVPages:
    """The pages of one layer: keys and values [P, K, S, D] (arrays, or `Fp8Pages`), and with sparse attention the
    compressed keys beside them."""

    k: Any
    v: Any
    compressed: CompressedKeys | None = None

    @property
    def scored_keys(self) -> Any:
        """The keys whose windows are compressed: those before RoPE where they are kept."""
        nope = None if self.compressed is None else self.compressed.nope
        return self.k if nope is None else nope


@dataclass(frozen=True, slots=True)
class LightningHeads:
    """The operands by which lightning attention makes its heads: the RMSNorms [D] of each query and key head, the
    rotary table (each None where there is none), and `decay` float32 [H, LIGHTNING_BLOCK + 1], exp(-slope i) in column
    i."""

    q_norm: Any | None
    k_norm: Any | None
    rope: Any | None
    decay: Any


@dataclass(frozen=True, slots=True)
class LightningState:
    """The caches of one layer of lightning attention: `states` float32 [B, H, D, D] of each slot, keys by values, and
    `chain` [rows, 2HD], keys and values of the rows of a chain of drafts that is not accepted yet (None: no drafts).
    """

    states: Any
    chain: Any | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The blocks that each row attends to: int32 [T, K, W], W = `config.num_selected`, in ascending order.

    Only rows with `config.leaves_out(position + 1)` have a list. The entries of other rows are undefined: such a row
    looks at every block up to its own.
    """

    blocks: Any
    config: SparseConfig


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each row: `experts` int32 [T, A], in ascending order, and `shares` float32 [T, A], the factors of
    their outputs. A row of padding has the experts -1."""

    experts: Any
    shares: Any


@dataclass(frozen=True, slots=True)
class Handoff:
    """A message from an op's kernel to a later op, besides its output; the forward passes it on.

    `prepared` is a value of the executor's own kind, such as the output rows once more in the order in which the next
    product reads them. `prefers_shared`: the kernel asked for all of a multiprocessor's shared memory, so a kernel that
    runs beside it should do so too. `comes_ahead`: the layer's attention started the kernel after it at once, so those
    that follow in the layer can be on the device before it is their turn.
    """

    prepared: Any = None
    prefers_shared: bool = False
    comes_ahead: bool = False


NOTHING = Handoff()
