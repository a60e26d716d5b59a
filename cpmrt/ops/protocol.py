"""Signatures of the ops. An op exists if and only if the fast path launches it: a fused kernel is a fused op.

Arrays are whatever the executor uses (NumPy, CuPy); shapes are in `ops/spec.py`. Outputs come first, then inputs,
then scalars. Arithmetic is float32; a value is rounded to the storage type where the op stores it and where a
normalised row enters a matrix product, nowhere else. The `weight` of a product is a matrix or a `QuantizedWeight`,
whose elements count as the exact float32 products that they stand for; with more than 64 rows they may be rounded to
the storage type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


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
        norm: Any,
        weight: Any,
        bias: Any | None,
        q_norm: Any | None,
        k_norm: Any | None,
        rope: Any,
        rows: Rows,
        eps: float,
    ) -> None:
        """RMSNorm, fused q/k/v projection, bias, per-head RMSNorm of q and k, RoPE (split halves); q is stored, k and
        v are appended to the pages of each row's slot at its position."""

    def decode_attention(self, out: Any, q: Any, k_pages: Any, v_pages: Any, rows: Rows, scale: float) -> None:
        """softmax(scale * q k) v for each row over positions 0 .. its own, of its own slot."""

    def prefill_attention(self, out: Any, q: Any, k_pages: Any, v_pages: Any, rows: Rows, scale: float) -> None:
        """The same for the consecutive rows of one slot, causal, as matrix products."""

    def project_residual(self, x: Any, inner: Any, weight: Any, bias: Any | None, scale: float) -> None:
        """x += scale * (inner weight^T + bias), in place (o_proj and down_proj)."""

    def gate_up(self, out: Any, x: Any, norm: Any, weight: Any, eps: float) -> None:
        """RMSNorm, fused gate and up projection, out = silu(gate) * up."""

    def lm_head(self, logits: Any, x: Any, norm: Any, weight: Any, eps: float, divisor: float) -> None:
        """Final RMSNorm and head: float32 logits = (norm(x) weight^T) / divisor."""
