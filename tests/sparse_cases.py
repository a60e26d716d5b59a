"""Slots of tokens with their compressed keys, and sparse attention over them on a device, op by op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from attention_cases import fp8_of, plan_of, planned_device, uploaded, workspace
from reference import sparse_brute_force as brute

from cpmrt.config import SparseConfig
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.ops.attention import Operands
from cpmrt.cuda.ops.attention.attention import AttentionOps
from cpmrt.cuda.ops.attention.selected import attend_selected_chunk
from cpmrt.cuda.ops.kv import compress_keys
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.ops import CompressedKeys, Fp8Pages, KVPages, Rows, Selection
from cpmrt.reference.fp8_pages import values_of
from cpmrt.reference.ops import NumpyOps
from cpmrt.reference.sparse_attention import append_compressed, block_scores, choose_blocks, compressed_of_row

UNWRITTEN = -7
SLACK = 1e-4
"""The relative error that a block's score may have from float32 sums in another order."""
SMALL = SparseConfig(init_blocks=1, window_size=64, topk=3, dense_len=-1)


class Slots:
    """Slots of `lengths` tokens in scattered pages, NaN where nothing is stored; float32 with values of `dtype`."""

    def __init__(
        self, dtype: DType, lengths: list[int], *, group: int = 16, kv_heads: int = 2, head_dim: int = 64, seed: int = 0
    ):
        self.dtype, self.lengths, self.group, self.kv_heads, self.head_dim = dtype, lengths, group, kv_heads, head_dim
        self.rng = np.random.default_rng(seed)
        self.scale = float(head_dim**-0.5)
        self.pages: dict[str, Fp8Pages] | None = None
        per_slot = pages_for(max(lengths)) + 1
        self.tables = self.rng.permutation(len(lengths) * per_slot).reshape(len(lengths), per_slot).astype(np.int32)
        shape = (self.tables.size, kv_heads, PAGE_SIZE, head_dim)
        self.k_pages, self.v_pages = (np.full(shape, np.nan, np.float32) for _ in "kv")
        for slot, length in enumerate(lengths):
            self.set_tokens(slot, self.normal(length, kv_heads, head_dim), self.normal(length, kv_heads, head_dim))
        self.compress(lengths)

    def normal(self, *shape: int) -> Any:
        return round_to(self.rng.standard_normal(shape, np.float32), self.dtype)

    def queries(self, count: int, spread: float = 1.0) -> Any:
        return round_to(np.float32(spread) * self.normal(count, self.kv_heads * self.group * self.head_dim), self.dtype)

    def set_tokens(self, slot: int, keys: Any, values: Any) -> None:
        """Store keys and values [tokens, K, D] from the slot's first position on."""
        at = np.arange(len(keys))
        for pages, tokens in ((self.k_pages, keys), (self.v_pages, values)):
            pages[self.tables[slot, at // PAGE_SIZE], :, at % PAGE_SIZE] = tokens

    def compress(self, lengths: list[int]) -> None:
        """Compute the compressed keys of the slots' first `lengths` tokens; all other entries are NaN."""
        pages = (self.tables.size, self.kv_heads)
        self.k1 = np.full((*pages, 4, self.head_dim), np.nan, np.float32)
        self.k2 = np.full((*pages, self.head_dim), np.nan, np.float32)
        for slot, length in enumerate(lengths):
            append_compressed(self.k1, self.k2, self.k_pages, self.tables[slot], range(length), self.dtype)

    @property
    def kv(self) -> KVPages:
        """The pages with their compressed keys."""
        return KVPages(self.k_pages, self.v_pages, CompressedKeys(self.k1, self.k2))

    def quantise(self) -> None:
        """Round keys and values to fp8: `pages` hold the codes, all other arrays the values of these codes."""
        self.pages = {name: fp8_of(getattr(self, f"{name}_pages"), seed) for seed, name in enumerate("kv")}
        for name, pages in self.pages.items():
            unwritten = np.isnan(getattr(self, f"{name}_pages"))
            values = values_of(pages, np.arange(len(pages.codes)))
            setattr(self, f"{name}_pages", np.where(unwritten, np.float32(np.nan), values))
        self.compress(self.lengths)

    def rows(self, positions: Any, slots: Any, *, is_prefill: bool = False, **tree: Any) -> Rows:
        """Return rows at these positions of these slots, as int32 as an executor has them."""
        places = [np.array(values, np.int32) for values in (positions, slots)]
        return Rows(np.zeros(len(places[0]), np.int32), *places, self.tables, is_prefill, **tree)

    def select(self, q: Any, rows: Rows, sparse: SparseConfig) -> Any:
        """Return the blocks that the NumPy op chooses."""
        blocks = np.full((len(q), self.kv_heads, sparse.num_selected), UNWRITTEN, np.int32)
        NumpyOps(self.dtype).select_blocks(blocks, q, self.kv, rows, self.scale, sparse)
        return blocks


class SparseDevice:
    """The ops of sparse attention on a device, with the pages of `slots`, in fp8 if theirs are.

    `sms` is the number of multiprocessors that grids are planned for, `rows_per_pass` the most rows of a selection
    pass, `fewest_tiled` the fewest rows of a chunk that take the tiled kernel, if it takes the shape.
    """

    def __init__(
        self,
        cuda: Any,
        slots: Slots,
        sparse: SparseConfig,
        *,
        max_rows: int = 64,
        sms: int = 132,
        rows_per_pass: int = 4096,
        fewest_tiled: int | None = None,
        portable: bool = False,
        pdl: bool = False,
    ):
        self.cuda, self.slots, self.sparse = cuda, slots, sparse
        heads = GroupedAttention(slots.group * slots.kv_heads, slots.kv_heads, slots.head_dim, sparse=sparse)
        device, context = planned_device(cuda, sms=sms, portable=portable), slots.tables.shape[1] * PAGE_SIZE
        plan = plan_of(heads, device, context, max_rows, is_fp8=slots.pages is not None)
        assert plan.selection is not None and plan.selected is not None
        few = min(rows_per_pass, plan.selection.rows_per_pass)
        plan = replace(plan, selection=replace(plan.selection, rows_per_pass=few))
        if fewest_tiled is not None:
            plan = replace(plan, selected=replace(plan.selected, fewest_tiled=fewest_tiled))
        self.plan, self.scratch = plan, workspace(cuda, plan)
        self.launcher = cuda.launcher(slots.dtype, pdl=pdl)
        names = ("k_pages", "v_pages", "k1", "k2")
        self.pages: dict[str, Any] = {name: cuda.array(getattr(slots, name), slots.dtype) for name in names}
        for name, pages in (slots.pages or {}).items():
            self.pages[f"{name}_pages"] = uploaded(cuda, pages)
            expanded = np.full((slots.tables.shape[1], *pages.shape[1:]), np.nan, np.float32)
            self.scratch[f"expanded_{name}"] = cuda.array(expanded, slots.dtype)
        identity = np.broadcast_to(np.arange(slots.tables.shape[1], dtype=np.int32), slots.tables.shape)
        self.scratch["expanded_tables"] = cuda.array(identity)
        self.ops = AttentionOps(self.launcher, plan, self.scratch)

    @property
    def kv(self) -> KVPages:
        """The pages on the device."""
        compressed = CompressedKeys(self.pages["k1"], self.pages["k2"])
        return KVPages(self.pages["k_pages"], self.pages["v_pages"], compressed)

    def rows(self, rows: Rows) -> Rows:
        """Return `rows` with their arrays on the device."""
        names = ("token_ids", "positions", "slots", "block_tables", "locations", "tree_masks", "tree_base")
        given = {name: getattr(rows, name) for name in names}
        return replace(
            rows, **{name: None if value is None else self.cuda.array(value) for name, value in given.items()}
        )  # fmt: skip

    def select(self, q: Any, rows: Rows) -> Any:
        blocks = self.cuda.array(np.full((len(q), self.slots.kv_heads, self.sparse.num_selected), UNWRITTEN, np.int32))
        self.ops.select_blocks(
            blocks, self.cuda.array(q, self.slots.dtype), self.kv, self.rows(rows), self.slots.scale, self.sparse,
        )  # fmt: skip
        return self.cuda.numpy(blocks)

    def attend(self, q: Any, rows: Rows, blocks: Any | None) -> Any:
        """Return attention over `blocks`, or over everything if None; rows that nothing is stored for are NaN."""
        attention = self.ops.prefill_attention if rows.is_prefill else self.ops.decode_attention
        given = self._given(q, rows, blocks)
        attention(given.out, given.q, given.kv, given.rows, given.scale, selection=given.selection)
        assert not self.cuda.numpy(self.scratch["attention_arrivals"]).any(), "counters were not reset"
        return self.cuda.numpy(given.out, self.slots.dtype)

    def attend_chosen(self, q: Any, rows: Rows, blocks: Any) -> Any:
        """Return only the part of a chunk's attention that goes over chosen blocks; other rows are NaN."""
        assert self.plan.selected is not None
        given = self._given(q, rows, blocks)
        attend_selected_chunk(self.launcher, self.plan.selected, given, self.scratch["chunk"], given.selection)
        return self.cuda.numpy(given.out, self.slots.dtype)

    def _given(self, q: Any, rows: Rows, blocks: Any | None) -> Any:
        """Return the operands of attention, with poison in place of its result."""
        if rows.is_prefill:
            chunk = np.array([rows.slots[0], rows.positions[0], (rows.slots >= 0).sum(), 0], np.int32)
            with self.cuda.stream:
                self.scratch["chunk"].set(chunk)
            self.cuda.sync()
        out = self.cuda.array(np.full(q.shape, np.nan, np.float32), self.slots.dtype)
        selection = None if blocks is None else Selection(self.cuda.array(blocks), self.sparse)
        query = self.cuda.array(q, self.slots.dtype)
        return Operands(out, query, self.kv, self.rows(rows), self.slots.scale, selection)

    def compress(self, rows: Rows, *, before_rope: bool = False) -> None:
        """Store the compressed keys of the windows that these rows complete; `before_rope` compresses keys before RoPE.

        The keys of `slots` then stand for those before RoPE, and the page's own keys are poison.
        """
        keys = self.pages["k_pages"]
        poison = self.cuda.array(np.full(keys.shape, np.nan), self.slots.dtype)
        compressed = CompressedKeys(self.pages["k1"], self.pages["k2"], keys if before_rope else None)
        compress_keys(self.launcher, KVPages(poison if before_rope else keys, None, compressed), self.rows(rows))

    def assert_compressed(self, k1: Any, k2: Any) -> None:
        """Check that the compressed keys on the device have these bits, entries that nothing wrote included."""
        for name, expected in (("k1", k1), ("k2", k2)):
            np.testing.assert_array_equal(
                self.cuda.numpy(self.pages[name]), from_float32(expected, self.slots.dtype), err_msg=name
            )  # fmt: skip


def any_choice(rng: Any, rows: Rows, kv_heads: int, sparse: SparseConfig) -> Any:
    """Return a list of blocks for each row and KV head that may leave some out, chosen by random scores."""
    blocks = np.full((len(rows.positions), kv_heads, sparse.num_selected), UNWRITTEN, np.int32)
    for row, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
        if slot >= 0 and sparse.leaves_out(int(position) + 1):
            scores = rng.random((kv_heads, int(position) // PAGE_SIZE), np.float32)
            blocks[row] = choose_blocks(scores, int(position), sparse)
    return blocks


def check_choices(slots: Slots, q: Any, rows: Rows, blocks: Any, sparse: SparseConfig) -> int:
    """Check every list of blocks by the scores of the NumPy op; return the number of rows that choose."""
    chosen = 0
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        if slot < 0 or brute.looks_at_everything(position, sparse):
            assert (blocks[row] == UNWRITTEN).all(), row
            continue
        chosen += 1
        keys = compressed_of_row(slots.kv, rows, row, slots.dtype)
        scores = block_scores(q[row].reshape(slots.kv_heads, slots.group, -1), *keys, slots.scale)
        for head in range(slots.kv_heads):
            brute.check_choice(blocks[row, head], scores[head].tolist(), position, sparse, SLACK)
    return chosen


def expected_attention(slots: Slots, q: Any, rows: Rows, blocks: Any, sparse: SparseConfig) -> Any:
    """Return the rows that the NumPy op gives, zeros for padding."""
    out = np.zeros_like(q)
    ops = NumpyOps(slots.dtype)
    attention = ops.prefill_attention if rows.is_prefill else ops.decode_attention
    kept = rows.slots >= 0
    few = replace(rows, token_ids=rows.token_ids[kept], positions=rows.positions[kept], slots=rows.slots[kept])
    results, selection = np.zeros_like(q[kept]), Selection(blocks[kept], sparse)
    k_pages, v_pages = (np.nan_to_num(pages) for pages in (slots.k_pages, slots.v_pages))
    attention(results, q[kept], KVPages(k_pages, v_pages), few, slots.scale, selection=selection)
    out[kept] = results
    return out
