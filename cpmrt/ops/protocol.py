"""Signatures of the ops. An op exists if and only if the fast path launches it: a fused kernel is a fused op.

Arrays are whatever the executor uses (NumPy, CuPy); shapes are in `ops/spec.py`. Outputs come first, then inputs,
then scalars. Arithmetic is float32; a value is rounded to the storage type where the op stores it and where a
normalised row enters a matrix product, nowhere else. The `weight` of a product is a matrix or a `QuantizedWeight`,
whose elements count as the exact float32 products that they stand for; with more than 64 rows they may be rounded to
the storage type. Keys and values may be stored in 8 bits (`Fp8Pages`), rounded once from float32; everybody reads what
is stored.

A row of slot -1 is padding: its keys and values are stored nowhere, its position may be anything, and nobody uses what
an op makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cpmrt.config import SparseConfig
from cpmrt.ops.sparse import CompressedKeys, Selection


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step: token, position and slot of each, and the block tables that map a slot to pages.

    In a prefill all rows belong to one slot and positions are consecutive; in a decode each row stands alone.

    A row of a draft tree has its keys and values at `locations[t]` of the slot's pages (None: at its position), since
    siblings share a position. It looks at positions 0 .. tree_base[t] - 1, and then, as positions tree_base[t] and
    on, at the locations tree_base[t] + i for every set bit i of tree_masks[t] in ascending order, its own the last of
    them: positions[t] = tree_base[t] + set bits - 1. An order of its path as if it stood alone: the row's bits are
    those of plain decoding.
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


class Ops(Protocol):
    """What a forward pass may call."""

    def embed(self, out: Any, token_ids: Any, table: Any, scale: float) -> None:
        """out = table[token_ids] * scale."""

    def qkv(
        self,
        q: Any,
        k_pages: Any,
        v_pages: Any,
        x: Any,
        norm: Any | None,
        weight: Any,
        bias: Any | None,
        q_norm: Any | None,
        k_norm: Any | None,
        rope: Any,
        rows: Rows,
        eps: float,
        compressed: CompressedKeys | None = None,
    ) -> None:
        """RMSNorm (`norm` None: x as it is), fused q/k/v projection, bias, per-head RMSNorm of q and k, RoPE (split
        halves) of each row's position; q is stored, k and v go to the pages of its slot, at its location.

        With `compressed` also the compressed key of every window that ends at a row's position, a mean in float32 of
        the stored keys, rounded. Rows of a tree add none: their path is not decided. The windows that end within an
        accepted path are compressed when its keys move to their positions. With its `nope_pages` q and k before RoPE
        are stored too, and those keys are compressed."""

    def select_blocks(
        self,
        blocks: Any,
        q: Any,
        k1_pages: Any,
        k2_pages: Any,
        k_pages: Any,
        rows: Rows,
        scale: float,
        config: SparseConfig,
    ) -> None:
        """The `Selection.blocks` of every row that leaves blocks out, by the scores that `config.sparse` defines, in
        float32. A row's list depends on its position, its query and the compressed keys up to it, nothing else.

        q and k_pages are those before RoPE with `use_nope`. A row of a tree uses the windows that a plain row of its
        position would: those that end at tree_base or later are means of the keys of its path, found in k_pages."""

    def decode_attention(
        self,
        out: Any,
        q: Any,
        k_pages: Any,
        v_pages: Any,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
    ) -> None:
        """softmax(scale * q k) v for each row over positions 0 .. its own, of its own slot, or with a `window` over so
        many last ones, its own among them. Where `rows` have tree masks, keys of a tree are found as `Rows` says.

        With a `selection`, which excludes a window, over the positions of each KV head's blocks, in ascending order; a
        row that leaves nothing out has the bits of one without a selection."""

    def prefill_attention(
        self,
        out: Any,
        q: Any,
        k_pages: Any,
        v_pages: Any,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
    ) -> None:
        """The same for the consecutive rows of one slot, causal, as matrix products. The first may stand at position
        -1, before the sequence: it takes no part, and its output is left undefined."""

    def project_residual(self, x: Any, inner: Any, weight: Any, bias: Any | None, scale: float) -> None:
        """x += scale * (inner weight^T + bias), in place (o_proj, down_proj, a draft's fc)."""

    def gate_up(self, out: Any, x: Any, norm: Any, weight: Any, eps: float) -> None:
        """RMSNorm, fused gate and up projection, out = silu(gate) * up."""

    def lm_head(self, logits: Any, x: Any, norm: Any | None, weight: Any, eps: float, divisor: float) -> None:
        """Final RMSNorm (`norm` None: x as it is) and head: float32 logits = (norm(x) weight^T) / divisor."""

    def rms_norm(self, out: Any, x: Any, norm: Any, eps: float) -> None:
        """out = x / sqrt(mean(x^2) + eps) * norm, rounded."""

    def join(self, joined: Any, a: Any, a_norm: Any | None, b: Any, b_norm: Any | None, eps: float) -> None:
        """joined = [norm(a) | norm(b)], rounded; a half without a norm is copied."""

    def copy_columns(self, out: Any, x: Any, first: int) -> None:
        """out[:, first : first + columns of x] = x; all three counts of columns are multiples of 8."""

    def clear(self, out: Any) -> None:
        """out = 0."""
