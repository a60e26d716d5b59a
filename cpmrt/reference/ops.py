"""NumPy bodies of the ops: float32 arithmetic, rounded to the storage type where the fast path stores.

Activations, weights and pages are float32 arrays that hold values of the storage type; a weight of a matrix product
may be quantised instead (`reference.quantized`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cpmrt.config import SparseConfig
from cpmrt.dtypes import F32, Array, DType, round_to
from cpmrt.ops import (
    NOTHING,
    BlockWeight,
    Fp8Pages,
    Handoff,
    KVPages,
    LatentWeights,
    LightningHeads,
    LightningState,
    MappedWeight,
    QkvWeights,
    QuantizedWeight,
    Routing,
    Rows,
    Selection,
    check_latent_shapes,
    check_shapes,
)
from cpmrt.reference import experts, lightning
from cpmrt.reference import latent_attention as latent
from cpmrt.reference import sparse_attention as sparse
from cpmrt.reference.fp8_pages import store, store_nodes
from cpmrt.reference.kv_rows import gather, gather_row, places_of
from cpmrt.reference.quantized import Matrix, dequantized, picked_rows
from cpmrt.reference.tiles import KEY_TILE, PREFILL_TILE, STEP_TILE, attend, key_tiles, product, softmax, tiles_of


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv 1910.07467)."""
    mean_square: F32 = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    scale: F32 = np.reciprocal(np.sqrt(mean_square + np.float32(eps)))
    normalised: F32 = x * scale * weight
    return normalised


def rotate(heads: F32, cos: F32, sin: F32) -> F32:
    """RoPE with split halves. heads [T, heads, D]; cos, sin [T, D/2]."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def turned(heads: F32, rope: F32 | None, rows: Rows) -> F32:
    """Return heads [T, heads, D] rotated to the positions of their rows; as they are without a table."""
    if rope is None:
        return heads
    cos, sin = rope[:, np.where(rows.slots >= 0, rows.positions, 0)]
    return rotate(heads, cos, sin)


def linear(x: F32, weight: Matrix, *, is_prefill: bool = False) -> F32:
    """x [T, K] times weight [N, K] transposed."""
    tiles = tiles_of(x, PREFILL_TILE if is_prefill else STEP_TILE)
    if isinstance(weight, np.ndarray):
        return product(tiles, weight, len(x))
    if isinstance(weight, QuantizedWeight) and weight.perm is not None:
        tiles = tiles[..., weight.perm]
    out = np.empty((len(x), weight.shape[0]), np.float32)
    for rows, values in dequantized(weight):
        out[:, rows] = product(tiles, values, len(x))
    return out


def times_sigmoid(x: F32, gate: F32) -> F32:
    """x * sigmoid(gate)."""
    with np.errstate(over="ignore"):
        found: F32 = x / (np.float32(1.0) + np.exp(-gate))
    return found


def silu(x: F32) -> F32:
    """x * sigmoid(x)."""
    return times_sigmoid(x, x)


def gated(gate: F32, up: F32, fatrelu: float | None = None) -> F32:
    """silu(gate) * up; with a threshold `fatrelu` gate * up where the gate is above it, else 0."""
    if fatrelu is None:
        return silu(gate) * up
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(gate > np.float32(fatrelu), gate * up, np.float32(0.0))


class NumpyOps:
    """`ops.protocol.Ops` in NumPy, storing values of `dtype`."""

    def __init__(self, dtype: DType):
        self.dtype = dtype

    def _normalised(self, x: F32, norm: F32 | None, eps: float) -> F32:
        """Return the rows as they enter a product: with a `norm` normalised and rounded, else as they are."""
        return x if norm is None else round_to(rms_norm(x, norm, eps), self.dtype)

    def _stored(self, pages: F32 | Fp8Pages, heads: F32) -> F32:
        """Return keys or values rounded to the storage type; as they are for 8-bit pages, which round by themselves."""
        return heads if isinstance(pages, Fp8Pages) else round_to(heads, self.dtype)

    def embed(self, out: F32, token_ids: Array, table: F32 | BlockWeight | MappedWeight, scale: float) -> None:
        check_shapes("embed", out=out, token_ids=token_ids, table=table)
        if isinstance(table, np.ndarray):
            rows = table[token_ids]
        else:
            rows = round_to(picked_rows(table, token_ids), self.dtype)
        out[:] = round_to(rows * np.float32(scale), self.dtype)

    def qkv(
        self,
        q: F32,
        kv: KVPages,
        x: F32,
        weights: QkvWeights,
        rope: F32 | None,
        rows: Rows,
        eps: float,
        q_nope: F32 | None = None,
        *,
        is_attended: bool = False,
    ) -> Handoff:
        check_shapes(
            "qkv", q=q, k=kv.k, v=kv.v, x=x, norm=weights.norm, weight=weights.weight, bias=weights.bias,
            q_norm=weights.q_norm, k_norm=weights.k_norm, rope=rope, positions=rows.positions, locations=rows.locations,
            slots=rows.slots, block_tables=rows.block_tables,
        )  # fmt: skip
        projected = linear(self._normalised(x, weights.norm, eps), weights.weight, is_prefill=rows.is_prefill)
        if weights.bias is not None:
            projected += weights.bias
        num_kv_heads, head_dim = kv.k.shape[1], kv.k.shape[3]
        heads = projected.reshape(len(x), -1, head_dim)
        q_heads = heads[:, : -2 * num_kv_heads]
        k_heads, v_heads = heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]
        if weights.q_norm is not None and weights.k_norm is not None:
            q_heads, k_heads = rms_norm(q_heads, weights.q_norm, eps), rms_norm(k_heads, weights.k_norm, eps)
        q[:] = round_to(turned(q_heads, rope, rows), self.dtype).reshape(q.shape)
        kept, pages, offsets = places_of(rows)
        for part, part_heads in ((kv.k, turned(k_heads, rope, rows)), (kv.v, v_heads)):
            if isinstance(part, Fp8Pages) and rows.tree_masks is not None:
                store_nodes(part, rows, part_heads)
            else:
                store(part, pages, offsets, self._stored(part, part_heads[kept]))
        if kv.compressed is not None:
            if kv.compressed.nope is not None and q_nope is not None:
                q_nope[:] = round_to(q_heads, self.dtype).reshape(q.shape)
                kv.compressed.nope[pages, :, offsets] = round_to(k_heads, self.dtype)[kept]
            if rows.tree_masks is None:
                sparse.append_step(kv, rows, self.dtype)
        return NOTHING

    def select_blocks(
        self, blocks: Array, q: F32, kv: KVPages, rows: Rows, scale: float, config: SparseConfig
    ) -> None:
        assert kv.compressed is not None
        check_shapes(
            "select_blocks", blocks=blocks, q=q, k1=kv.compressed.k1, k2=kv.compressed.k2, k=kv.scored_keys,
            positions=rows.positions, slots=rows.slots, block_tables=rows.block_tables, tree_masks=rows.tree_masks,
            tree_base=rows.tree_base,
        )  # fmt: skip
        sparse.select_blocks(blocks, q, kv, rows, scale, config, self.dtype)

    def decode_attention(
        self, out: F32, q: F32, kv: KVPages, rows: Rows, scale: float, window: int = 0,
        selection: Selection | None = None, after: Handoff = NOTHING, *, is_projected: bool = False,
    ) -> Handoff:  # fmt: skip
        check_shapes(
            "decode_attention", out=out, q=q, k=kv.k, v=kv.v, positions=rows.positions, tree_masks=rows.tree_masks,
            tree_base=rows.tree_base, blocks=selection and selection.blocks,
        )  # fmt: skip
        num_kv_heads, head_dim = kv.k.shape[1], kv.k.shape[3]
        out[rows.slots < 0] = 0.0
        for row in map(int, np.flatnonzero(rows.slots >= 0)):
            keys, values = (gather_row(pages, rows, row, window) for pages in (kv.k, kv.v))
            if selection is not None:
                keys, values = (sparse.chosen_tokens(tokens, selection, row) for tokens in (keys, values))
            groups = q[row].reshape(num_kv_heads, -1, head_dim)
            weights = softmax(groups @ keys.transpose(0, 2, 1) * np.float32(scale))
            out[row] = round_to((weights @ values).reshape(-1), self.dtype)
        return NOTHING

    def prefill_attention(
        self,
        out: F32,
        q: F32,
        kv: KVPages,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
    ) -> None:
        check_shapes(
            "prefill_attention", out=out, q=q, k=kv.k, v=kv.v, positions=rows.positions,
            blocks=selection and selection.blocks,
        )  # fmt: skip
        num_rows, num_kv_heads, head_dim = len(q), kv.k.shape[1], kv.k.shape[3]
        if rows.positions[0] < 0:
            assert selection is None, "only a draft's rows begin before the sequence, and it chooses no blocks"
            out[0] = 0.0
            taken = replace(rows, positions=rows.positions[1:], slots=rows.slots[1:])
            if num_rows > 1:
                self.prefill_attention(out[1:], q[1:], kv, taken, scale, window)
            return
        block_table, length = rows.block_tables[rows.slots[-1]], int(rows.positions[-1]) + 1
        keys, values = (key_tiles(gather(pages, block_table, length)) for pages in (kv.k, kv.v))
        places = np.arange(keys.shape[1] * KEY_TILE)
        q_heads = q.reshape(num_rows, num_kv_heads, -1, head_dim)
        out_heads = out.reshape(num_rows, num_kv_heads, -1, head_dim)
        for head in range(num_kv_heads):
            seen = places <= rows.positions[:, None]
            if window:
                seen &= places > rows.positions[:, None] - window
            if selection is not None:
                seen[:, :length] &= ~sparse.left_out(selection, rows.positions, head, length)
            tiles = zip(tiles_of(q_heads[:, head], PREFILL_TILE), tiles_of(seen, PREFILL_TILE), strict=True)
            for first, (queries, seen_by) in zip(range(0, num_rows, PREFILL_TILE), tiles, strict=True):
                attended = attend(queries.transpose(1, 0, 2), keys[head], values[head], seen_by, scale)
                into = out_heads[first : first + PREFILL_TILE, head]
                into[:] = round_to(attended.transpose(1, 0, 2)[: len(into)], self.dtype)

    def project(
        self, out: F32, x: F32, norm: F32 | None, weight: Matrix, eps: float, *, is_prefill: bool = False
    ) -> None:
        columns = check_shapes("project", out=out, x=x, norm=norm, weight=weight)["I"]
        assert x.shape[1] == columns or not is_prefill and x.shape[1] > columns
        x = x[:, :columns]
        out[:] = round_to(linear(self._normalised(x, norm, eps), weight, is_prefill=is_prefill), self.dtype)

    def append_latent(
        self, q_latent: F32, pages: F32, latents: F32, weights: LatentWeights, rope: F32, rows: Rows, eps: float
    ) -> None:
        sizes = check_shapes(
            "append_latent", q_latent=q_latent, pages=pages, latents=latents, q_norm=weights.q_norm,
            kv_norm=weights.kv_norm, rope=rope, positions=rows.positions, locations=rows.locations, slots=rows.slots,
            block_tables=rows.block_tables,
        )  # fmt: skip
        q_latent[:] = self._normalised(latents[:, : sizes["A"]], weights.q_norm, eps)
        self._store_latents(pages, latents[:, sizes["A"] :], weights.kv_norm, rope, rows, eps)

    def _store_latents(self, pages: F32, latents: F32, norm: F32, rope: F32, rows: Rows, eps: float) -> None:
        """Store latents and shared keys [T, C + R] of rows: normalised, and rotated."""
        kept, places, offsets = places_of(rows)
        kv_latent = rms_norm(latents[kept, : len(norm)], norm, eps)
        shared = turned(latents[:, None, len(norm) :], rope, rows)[kept, 0]
        pages[places, 0, offsets] = round_to(np.concatenate([kv_latent, shared], axis=1), self.dtype)

    def decode_latent_attention(
        self, out: F32, q: F32, latents: F32 | None, pages: F32, weights: LatentWeights, rope: F32, rows: Rows,
        scale: float, eps: float, upcoming: Matrix | None = None, q_up: Matrix | None = None,
    ) -> None:  # fmt: skip
        if q_up is not None:
            assert latents is not None, "q_up makes queries of latents"
            self.project(q, latents, weights.q_norm, q_up, eps)
        query, rotated = _latent_queries("decode_latent_attention", out, q, pages, weights, rope, rows, latents)
        if latents is not None:
            self._store_latents(pages, latents[:, len(weights.q_norm) :], weights.kv_norm, rope, rows, eps)
        out[rows.slots < 0] = 0.0
        for row in map(int, np.flatnonzero(rows.slots >= 0)):
            attended = latent.attend_row(query[row], rotated[row], pages, weights.up, rows, row, scale)
            out[row] = round_to(attended.reshape(-1), self.dtype)

    def prefill_latent_attention(
        self, out: F32, q: F32, pages: F32, weights: LatentWeights, rope: F32, rows: Rows, scale: float
    ) -> None:
        query, rotated = _latent_queries("prefill_latent_attention", out, q, pages, weights, rope, rows)
        attended = np.empty((len(q), len(weights.up), weights.up.shape[1] - query.shape[2]), np.float32)
        latent.attend_chunk(attended, query, rotated, pages, weights.up, rows, scale)
        out[:] = round_to(attended.reshape(out.shape), self.dtype)

    def lightning_decode(
        self, out: F32, qkv: F32, heads: LightningHeads, state: LightningState, rows: Rows, eps: float
    ) -> None:
        parts = self._lightning_heads("lightning_decode", out, qkv, heads, state, rows, eps)
        lightning.decode(out, parts, heads.decay, state, rows, self.dtype)

    def lightning_prefill(
        self, out: F32, qkv: F32, heads: LightningHeads, state: LightningState, rows: Rows, eps: float
    ) -> None:
        parts = self._lightning_heads("lightning_prefill", out, qkv, heads, state, rows, eps)
        lightning.prefill(out, parts, heads.decay, state, rows, self.dtype)

    def lightning_accept(self, state: LightningState, decay: F32, accepted: tuple[int, int]) -> None:
        """`accepted`: the slot, and the number of rows."""
        check_shapes("lightning_accept", states=state.states, chain=state.chain, decay=decay)
        lightning.accept_chain(state, decay, *accepted)

    def _lightning_heads(
        self, op: str, out: F32, qkv: F32, heads: LightningHeads, state: LightningState, rows: Rows, eps: float
    ) -> tuple[F32, F32, F32]:
        """Return q, k and v [T, H, D] as they enter the state: q and k normalised and rotated, all rounded."""
        check_shapes(
            op, out=out, qkv=qkv, states=state.states, chain=state.chain, q_norm=heads.q_norm, k_norm=heads.k_norm,
            rope=heads.rope, decay=heads.decay, positions=rows.positions, slots=rows.slots,
        )  # fmt: skip
        q, k, v = np.split(qkv.reshape(len(qkv), -1, state.states.shape[-1]), 3, axis=1)
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = rms_norm(q, heads.q_norm, eps), rms_norm(k, heads.k_norm, eps)
        q, k = turned(q, heads.rope, rows), turned(k, heads.rope, rows)
        return round_to(q, self.dtype), round_to(k, self.dtype), round_to(v, self.dtype)

    def gate_rows(self, out: F32, norm: F32 | None, gate: F32 | None, eps: float) -> None:
        check_shapes("gate_rows", out=out, norm=norm, gate=gate)
        normed = out if norm is None else rms_norm(out, norm, eps)
        out[:] = round_to(normed if gate is None else times_sigmoid(normed, gate), self.dtype)

    def project_residual(
        self, x: F32, inner: F32, weight: Matrix, bias: F32 | None, scale: float, after: Handoff = NOTHING,
        *, ahead: Matrix | None = None, is_prefill: bool = False,
    ) -> Handoff:  # fmt: skip
        check_shapes("project_residual", x=x, inner=inner, weight=weight, bias=bias)
        added = linear(inner, weight, is_prefill=is_prefill)
        if bias is not None:
            added += bias
        x[:] = round_to(x + np.float32(scale) * added, self.dtype)
        return NOTHING

    def gate_up(
        self, out: F32, x: F32, norm: F32, weight: Matrix, eps: float, after: Handoff = NOTHING,
        *, fatrelu: float | None = None, is_prefill: bool = False,
    ) -> Handoff:  # fmt: skip
        check_shapes("gate_up", out=out, x=x, norm=norm, weight=weight)
        both = linear(self._normalised(x, norm, eps), weight, is_prefill=is_prefill)
        gate, up = both[:, : out.shape[1]], both[:, out.shape[1] :]
        out[:] = round_to(gated(gate, up, fatrelu), self.dtype)
        return NOTHING

    def route(self, routing: Routing, x: F32, norm: F32, router: F32, eps: float, rows: Rows) -> Handoff:
        check_shapes("route", experts=routing.experts, shares=routing.shares, x=x, norm=norm, router=router)
        scores = linear(self._normalised(x, norm, eps), router, is_prefill=rows.is_prefill)
        routing.experts[:], routing.shares[:] = experts.choose(scores, routing.experts.shape[1])
        routing.experts[rows.slots < 0] = -1
        return NOTHING

    def experts_gate_up(
        self, out: F32, x: F32, norm: F32, weight: Matrix, eps: float, routing: Routing, after: Handoff = NOTHING,
        *, down: Matrix | None = None, is_prefill: bool = False,
    ) -> Handoff:  # fmt: skip
        check_shapes(
            "experts_gate_up", out=out, x=x, norm=norm, weight=weight, experts=routing.experts, shares=routing.shares
        )
        normed, parts = self._normalised(x, norm, eps), experts.parts(out, routing)
        for rows, place, (gate, up) in experts.of_each(routing, weight, parts.shape[2], halves=2):
            gates, ups = (linear(normed[rows], half, is_prefill=is_prefill) for half in (gate, up))
            parts[rows, place] = round_to(silu(gates) * ups, self.dtype)
        return NOTHING

    def experts_down(
        self, x: F32, inner: F32, weight: Matrix, scale: float, routing: Routing, after: Handoff = NOTHING,
        *, ahead: Matrix | None = None, is_prefill: bool = False,
    ) -> None:  # fmt: skip
        check_shapes(
            "experts_down", x=x, inner=inner, weight=weight, experts=routing.experts, shares=routing.shares
        )
        added, parts = np.zeros_like(x), experts.parts(inner, routing)
        for rows, place, (down,) in experts.of_each(routing, weight, x.shape[1]):
            product = linear(parts[rows, place], down, is_prefill=is_prefill)
            added[rows] += routing.shares[rows, place, None] * product
        kept = routing.experts[:, 0] >= 0
        x[kept] = round_to(x + np.float32(scale) * added, self.dtype)[kept]

    def lm_head(self, logits: F32, x: F32, norm: F32 | None, weight: Matrix, eps: float, divisor: float) -> None:
        check_shapes("lm_head", logits=logits, x=x, norm=norm, weight=weight)
        logits[:] = linear(self._normalised(x, norm, eps), weight) / np.float32(divisor)

    def rms_norm(self, out: F32, x: F32, norm: F32, eps: float) -> None:
        check_shapes("rms_norm", out=out, x=x, norm=norm)
        out[:] = self._normalised(x, norm, eps)

    def join(self, joined: F32, a: F32, a_norm: F32 | None, b: F32, b_norm: F32 | None, eps: float) -> None:
        sizes = check_shapes("join", joined=joined, a=a, a_norm=a_norm, b=b, b_norm=b_norm)
        joined[:, : sizes["A"]] = self._normalised(a, a_norm, eps)
        joined[:, sizes["A"] :] = self._normalised(b, b_norm, eps)

    def copy_columns(self, out: F32, x: F32, first: int) -> None:
        check_shapes("copy_columns", out=out, x=x)
        out[:, first : first + x.shape[1]] = x

    def clear(self, out: F32) -> None:
        check_shapes("clear", out=out)
        out[:] = 0.0


def _latent_queries(
    op: str, out: F32, q: F32, pages: F32, weights: LatentWeights, rope: F32, rows: Rows, latents: F32 | None = None
) -> tuple[F32, F32]:
    """Return the two parts of each head's query: the plain one [T, H, N], and the one to rotate, rotated [T, H, R]."""
    check_latent_shapes(op, out, q, pages, weights, rope, rows, latents)
    heads, rope_dim = q.reshape(len(q), len(weights.up), -1), 2 * rope.shape[2]
    return heads[..., :-rope_dim], turned(heads[..., -rope_dim:], rope, rows)
