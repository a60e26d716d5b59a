"""Signatures of the ops. An op exists if and only if the fast path launches it: a fused kernel is a fused op.

Arrays are whatever the executor uses (NumPy, CuPy); shapes are in `ops/spec.py`. Outputs come first, then inputs,
then scalars. Arithmetic is float32; a value is rounded to the storage type where the op stores it and where a
normalised row enters a matrix product, nowhere else. The `weight` of a product is a matrix or a quantised weight of the
executor's own kind, whose elements count as the exact float32 products that they stand for. In a prefill they may be
rounded to the storage type, and so may a product before it is added to the residual stream. Keys and values may be
stored in 8 bits (`Fp8Pages`), rounded once from float32; every op reads the stored values.

The bits of a row never depend on the other rows of its step or on their number. Prefill steps and other steps may sum
in different orders: `rows.is_prefill` tells them apart, or `is_prefill` for an op that does not get the `Rows`.

A row of slot -1 is padding: its keys and values are stored nowhere, its position may be anything, and nobody uses its
outputs.
"""

from __future__ import annotations

from typing import Any, Protocol

from cpmrt.config import SparseConfig
from cpmrt.ops.operands import (
    NOTHING,
    Handoff,
    KVPages,
    LatentWeights,
    LightningHeads,
    LightningState,
    QkvWeights,
    Routing,
    Rows,
    Selection,
)


class Ops(Protocol):
    """The ops that a forward pass may call."""

    def embed(self, out: Any, token_ids: Any, table: Any, scale: float) -> None:
        """out = table[token_ids] * scale."""

    def qkv(
        self, q: Any, kv: KVPages, x: Any, weights: QkvWeights, rope: Any | None, rows: Rows, eps: float,
        q_nope: Any = None, *, is_attended: bool = False,
    ) -> Handoff:  # fmt: skip
        """RMSNorm, fused q/k/v projection, bias, per-head RMSNorm of q and k, RoPE (split halves) of each row's
        position (`rope` None: none); q is stored, k and v go to the pages of its slot, at its location.

        With `kv.compressed` also the compressed key of every window that ends at a row's position, a mean in float32 of
        the stored keys, rounded. Rows of a tree add none: their path is not decided. The windows that end within an
        accepted path are compressed when its keys move to their positions. With `kv.compressed.nope` q and k before
        RoPE are stored too, q to `q_nope`, and it is those keys that are compressed.

        `is_attended`: `decode_attention` of these rows over all their keys follows, and gets the handoff of this op.
        `decode_attention` may then do the work of both, which leaves q undefined."""
        ...

    def project(
        self, out: Any, x: Any, norm: Any | None, weight: Any, eps: float, *, is_prefill: bool = False
    ) -> None:
        """out = norm(x) weight^T (`norm` None: x as it is), rounded. Of x [T, X] it takes the first columns, as many as
        `weight` has; in a prefill chunk these are all."""

    def lightning_decode(
        self, out: Any, qkv: Any, heads: LightningHeads, state: LightningState, rows: Rows, eps: float
    ) -> None:
        """Lightning attention of each row: norms and RoPE of the heads of q and k, all of q, k and v rounded, then with
        S the state of the row's slot, in float32,
            S = decay S + k^T v;    out = D^-0.5 q S, rounded.
        `qkv` [T, 3HD] is the projection. The rows of a tree are a chain in one slot: each takes up the state behind the
        row before it, none is stored, and their keys and values go to `state.chain` for `lightning_accept`."""

    def lightning_prefill(
        self, out: Any, qkv: Any, heads: LightningHeads, state: LightningState, rows: Rows, eps: float
    ) -> None:
        """Lightning attention, as `lightning_decode` defines it, of the consecutive rows of one slot, the first at a
        multiple of LIGHTNING_BLOCK, as matrix products of whole blocks: for row i of a block of n rows, S being the
        state before the block,
            out_i = D^-0.5 (decay^(i+1) q_i S + sum over j <= i of decay^(i-j) (q_i k_j) v_j),
        and after it S = decay^n S + sum over j of decay^(n-1-j) k_j^T v_j. A prompt's bits do not depend on where it
        was cut, since it is cut between blocks. `qkv` is overwritten."""

    def lightning_accept(self, state: LightningState, decay: Any, accepted: Any) -> None:
        """Take the accepted rows of a chain into the states of its slot, as plain decoding would have, to the bit.
        `state` has the arrays of all layers together, with a dimension for the layers before the others. `accepted`
        says in the executor's own words which slot and how many rows."""

    def gate_rows(self, out: Any, norm: Any | None, gate: Any | None, eps: float) -> None:
        """out = norm(out) * sigmoid(gate), in place, rounded once; `norm` or `gate` None: without that part."""

    def select_blocks(self, blocks: Any, q: Any, kv: KVPages, rows: Rows, scale: float, config: SparseConfig) -> None:
        """Fill `blocks` with the `Selection.blocks` of every row that leaves blocks out, by the scores that
        `config.sparse` defines, in float32. A row's list depends on its position, its query and the compressed keys up
        to it, nothing else.

        With `use_nope` q are the queries before RoPE, as `kv.scored_keys` are the keys. A row of a tree uses the
        windows that a plain row of its position would: those that end at tree_base or later are means of the keys of
        its path."""

    def decode_attention(
        self,
        out: Any,
        q: Any,
        kv: KVPages,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
        after: Handoff = NOTHING,
        *,
        is_projected: bool = False,
    ) -> Handoff:
        """softmax(scale * q k) v for each row over positions 0 .. its own, of its own slot, or with a `window` over the
        last `window` of them, its own included. Where `rows` have tree masks, keys of a tree are found as `Rows` says.

        With a `selection`, which excludes a window, it goes over the positions of each KV head's blocks, in ascending
        order; a row that leaves nothing out has the bits of one without a selection. `after`: the handoff of `qkv`.

        `is_projected`: `project_residual` of `out`, the next op, gets the handoff of this one. It may then do the work
        of both, which leaves `out` undefined."""
        ...

    def prefill_attention(
        self,
        out: Any,
        q: Any,
        kv: KVPages,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
    ) -> None:
        """The attention of `decode_attention` for the consecutive rows of one slot, causal, as matrix products. The
        first row may stand at position -1, before the sequence: it takes no part, and its output is left undefined."""

    def append_latent(
        self, q_latent: Any, pages: Any, latents: Any, weights: LatentWeights, rope: Any, rows: Rows, eps: float
    ) -> None:
        """q_latent = RMSNorm of the first A columns of latents [T, A + C + R]. The RMSNorm of the next C columns, and
        the last R, rotated (split halves) by the row's position, go to the pages of its slot, at its location."""

    def decode_latent_attention(
        self, out: Any, q: Any, latents: Any | None, pages: Any, weights: LatentWeights, rope: Any, rows: Rows,
        scale: float, eps: float, upcoming: Any | None = None, q_up: Any | None = None,
    ) -> None:  # fmt: skip
        """softmax(scale * q k) v for each row over positions 0 .. its own, of its own slot; keys of a tree are found as
        `Rows` says. Of a head's query [N | R] the last R elements are rotated by the row's position. The pages hold
        c [C] and r [R] of a token: its key is [up_k c | r], its value up_v c. First the rows' own `latents` go to the
        pages, as by `append_latent`; None: they are there already. With `q_up` [H (N + R), A] the queries are its
        product with the RMSNorm of the first A columns of these latents, and q is scratch memory for them. `upcoming`:
        a weight that a later product reads soon, parts of which may be fetched meanwhile."""

    def prefill_latent_attention(
        self, out: Any, q: Any, pages: Any, weights: LatentWeights, rope: Any, rows: Rows, scale: float
    ) -> None:
        """The attention of `decode_latent_attention` for the consecutive rows of one slot, causal, as matrix products:
        keys and values of heads may be rounded to the storage type."""

    def project_residual(
        self, x: Any, inner: Any, weight: Any, bias: Any | None, scale: float, after: Handoff = NOTHING,
        *, ahead: Any = None, is_prefill: bool = False,
    ) -> Handoff:  # fmt: skip
        """x += scale * (inner weight^T + bias), in place (o_proj, down_proj, a draft's fc). `after`: the handoff of the
        op that made `inner`. `ahead`: the weight of the product behind this one, parts of which may be fetched."""
        ...

    def gate_up(
        self, out: Any, x: Any, norm: Any, weight: Any, eps: float, after: Handoff = NOTHING,
        *, fatrelu: float | None = None, is_prefill: bool = False,
    ) -> Handoff:  # fmt: skip
        """RMSNorm, fused gate and up projection, out = silu(gate) * up. With `fatrelu` out is gate * up where the gate
        is above this threshold, else 0. `after`: the handoff of the layer's mixer."""
        ...

    def route(self, routing: Routing, x: Any, norm: Any, router: Any, eps: float, rows: Rows) -> Handoff:
        """RMSNorm and the router's scores of each row. `routing` gets the A experts of the highest scores (among equals
        the lower index), and as their shares the softmax over these A scores in float32."""
        ...

    def experts_gate_up(
        self, out: Any, x: Any, norm: Any, weight: Any, eps: float, routing: Routing, after: Handoff = NOTHING,
        *, down: Any = None, is_prefill: bool = False,
    ) -> Handoff:  # fmt: skip
        """`gate_up` with each of the row's experts: out [T, A F] has the columns of the first expert, then those of the
        next. Rows of padding are left undefined. `after`: the handoff of `route`. `down`: the weight of the
        `experts_down` that follows. Parts of it may be fetched ahead, or that op may do the work of both, which leaves
        `out` undefined."""
        ...

    def experts_down(
        self, x: Any, inner: Any, weight: Any, scale: float, routing: Routing, after: Handoff = NOTHING,
        *, ahead: Any = None, is_prefill: bool = False,
    ) -> None:  # fmt: skip
        """x += scale * the sum of share * (inner weight^T) over the row's experts, added in their order, in place.
        Padding stays as it is. `after`: the handoff of `experts_gate_up`. `ahead`: a weight that is read next, parts of
        which may be fetched."""

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
