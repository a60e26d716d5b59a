"""The ops of sparse attention against brute force, into poisoned outputs, out of pages poisoned where nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from reference import sparse_brute_force as brute
from reference.operands import Data, filled_pages, make_rows

from cpmrt.config import SparseConfig
from cpmrt.dtypes import DType, round_to
from cpmrt.ops import OPS, CompressedKeys, KVPages, Selection
from cpmrt.reference.drafting import keep_path
from cpmrt.reference.kv_rows import gather
from cpmrt.reference.ops import NumpyOps
from cpmrt.reference.sparse_attention import append_compressed

PAGE, DIM, SCALE = 64, 16, 0.25
SMALL = SparseConfig(init_blocks=1, window_size=64, topk=3, dense_len=-1)
DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
UNWRITTEN = -7


class Context:
    """One slot of `length` tokens in scattered pages, its compressed keys, and queries for rows anywhere in it."""

    def __init__(self, length: int, kv_heads: int = 2, group: int = 4, dtype: DType = DType.FLOAT32, seed: int = 0):
        self.data, self.dtype, self.length = Data(dtype, seed), dtype, length
        self.kv_heads, self.group, self.ops = kv_heads, group, NumpyOps(dtype)
        self.tables = self.data.tables(1, -(-length // PAGE) + 1)
        self.k_pages, self.v_pages = filled_pages(self.data, self.tables, [length], kv_heads, DIM)
        self.compress()

    def compress(self) -> None:
        pages = (self.tables.size, self.kv_heads)
        self.k1 = np.full((*pages, 4, DIM), np.nan, np.float32)
        self.k2 = np.full((*pages, DIM), np.nan, np.float32)
        append_compressed(self.k1, self.k2, self.k_pages, self.tables[0], range(self.length), self.dtype)

    @property
    def kv(self) -> KVPages:
        return KVPages(self.k_pages, self.v_pages, CompressedKeys(self.k1, self.k2))

    def set_keys(self, keys: Any) -> None:
        """Store keys [tokens, D], the same for every KV head, and compress them."""
        for position, key in enumerate(keys):
            self.k_pages[self.tables[0, position // PAGE], :, position % PAGE] = key
        self.compress()

    def queries(self, count: int) -> Any:
        return self.data(count, self.kv_heads * self.group * DIM)

    def select(self, q: Any, positions: Any, config: SparseConfig) -> Any:
        blocks = np.full((len(q), self.kv_heads, config.num_selected), UNWRITTEN, np.int32)
        rows = make_rows(positions, np.zeros(len(q), np.int64), self.tables)
        self.ops.select_blocks(blocks, q, self.kv, rows, SCALE, config)
        return blocks

    def keys(self, head: int, position: int) -> Any:
        return self.keys_of_all(position + 1)[head]

    def keys_of_all(self, count: int) -> Any:
        return gather(self.k_pages, self.tables[0], count)

    def scores(self, q_row: Any, head: int, position: int) -> list[float]:
        """Return the blocks' scores by brute force, from compressed keys rounded to the storage type."""
        keys = self.keys(head, position)
        k1, k2 = (
            [round_to(mean.astype(np.float32), self.dtype) for mean in brute.windows(keys, size, stride)]
            for size, stride in ((32, 16), (128, 64))
        )
        heads = q_row.reshape(self.kv_heads, self.group, DIM)
        return brute.scores(heads[head], k1, k2, SCALE, position // PAGE)


@DTYPES
@pytest.mark.parametrize("length", [31, 32, 63, 64, 127, 128, 129, 200, 256])
def test_compressed_keys_are_means_of_the_complete_windows_and_nothing_else(length, dtype):
    context = Context(length, dtype=dtype)
    tolerance = {DType.FLOAT32: 1e-6, DType.FLOAT16: 1e-3, DType.BFLOAT16: 8e-3}[dtype]
    for head in range(2):
        keys = context.keys(head, length - 1)
        fine, coarse = brute.windows(keys, 32, 16), brute.windows(keys, 128, 64)
        for j, mean in enumerate(fine):
            page, offset = divmod(16 * j + 31, PAGE)
            stored = context.k1[context.tables[0, page], head, offset // 16]
            np.testing.assert_allclose(stored, mean, rtol=tolerance, atol=tolerance)
            assert np.array_equal(round_to(stored, dtype), stored)
        for j, mean in enumerate(coarse):
            stored = context.k2[context.tables[0, j + 1], head]
            np.testing.assert_allclose(stored, mean, rtol=tolerance, atol=tolerance)
        assert np.isfinite(context.k1[:, head]).all(axis=-1).sum() == len(fine)
        assert np.isfinite(context.k2[:, head]).all(axis=-1).sum() == len(coarse)


@pytest.mark.parametrize(
    ("group", "config"),
    [(16, SMALL), (8, SparseConfig(2, 128, 6, 300)), (4, SparseConfig(0, 64, 1, 0)), (1, SMALL)],
    ids=["16", "8", "4", "1"],
)
def test_every_offset_within_a_block(group, config):
    """Choices are right at every offset in a block; rows that leave nothing out keep their lists as they were."""
    context = Context(1024, group=group)
    positions = np.concatenate([np.arange(256, 320, 3), np.arange(577, 641), np.arange(960, 1024, 9)])
    q = context.queries(len(positions))
    blocks = context.select(q, positions, config)
    num_chosen = 0
    for row, position in enumerate(map(int, positions)):
        for head in range(context.kv_heads):
            if brute.looks_at_everything(position, config):
                assert (blocks[row, head] == UNWRITTEN).all()
                continue
            num_chosen += 1
            brute.check_choice(blocks[row, head], context.scores(q[row], head, position), position, config, 1e-5)
    assert num_chosen > 100


@DTYPES
def test_storage_types(dtype):
    context, positions = Context(700, dtype=dtype), np.array([400, 555, 699])
    q = context.queries(3)
    blocks = context.select(q, positions, SMALL)
    for row, position in enumerate(map(int, positions)):
        for head in range(context.kv_heads):
            brute.check_choice(blocks[row, head], context.scores(q[row], head, position), position, SMALL, 1e-5)


@pytest.mark.parametrize("num_tokens", [319, 320, 321, 384, 385, 448, 449])
@pytest.mark.parametrize("dense_len", [-1, 0, 385, 386])
def test_the_switch_is_at_dense_len_and_at_more_blocks_than_may_be_chosen(dense_len, num_tokens):
    """Blocks are chosen from `dense_len` tokens on, and only beyond the 320 tokens that five blocks hold."""
    config = SparseConfig(1, 128, 3, dense_len)
    context = Context(num_tokens)
    written = (context.select(context.queries(1), [num_tokens - 1], config) != UNWRITTEN).all()
    assert written == (num_tokens >= max(dense_len, 321))
    assert written != brute.looks_at_everything(num_tokens - 1, config)
    assert written == config.leaves_out(num_tokens)


def test_equal_scores_take_the_lower_blocks():
    context = Context(1024, group=8)
    context.set_keys(np.tile(np.arange(DIM) % 3, (1024, 1)))
    config = SparseConfig(2, 128, 6, -1)
    for position in (768, 831, 1000):
        blocks = context.select(context.queries(1), [position], config)
        own = position // PAGE
        assert blocks.tolist() == [[[0, 1, 2, 3, 4, own - 2, own - 1, own]] * 2]


@examples(40)
@given(data=st.data())
def test_planted_ties(data):
    """Small integers make every product exact, so that equal windows score exactly alike."""
    num_blocks = data.draw(st.integers(7, 14))
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=num_blocks, max_size=num_blocks))
    length = 64 * num_blocks - data.draw(st.integers(0, 63))
    context = Context(length, group=1)
    levels = np.repeat(np.array(kinds), 64)[:length]
    context.set_keys(np.tile(levels[:, None], (1, DIM)).astype(np.float32))
    q = np.full((1, 2 * DIM), data.draw(st.sampled_from([-1.0, 0.0, 1.0])), np.float32)
    config = SparseConfig(1, 64, data.draw(st.integers(2, 5)), -1)
    blocks = context.select(q, [length - 1], config)
    expected = brute.chosen(context.scores(q[0], 0, length - 1), length - 1, config)
    assert blocks.tolist() == [[expected, expected]]


def test_one_window_decides_for_each_block_that_it_overlaps():
    """The window of tokens 16 j .. 16 j + 31 counts for block b when j is in 4 b - 1 .. 4 b + 3."""
    config = SparseConfig(1, 64, 3, -1)
    for j in range(8, 36):
        context = Context(1000, group=1)
        keys = np.zeros((1000, DIM))
        keys[16 * j : 16 * j + 32] = 1.0
        context.set_keys(keys)
        q = np.ones((1, 2 * DIM), np.float32)
        full = {b for b in range(2, 13) if 4 * b - 1 <= j <= 4 * b + 3}
        blocks = context.select(q, [999], config)
        expected = brute.chosen(context.scores(q[0], 0, 999), 999, config)
        assert blocks[0, 0].tolist() == expected
        assert len(full & set(expected)) == 1


def test_the_normaliser_comes_from_the_coarse_keys():
    """Two heads that want different blocks: the weight between them follows K2's sum, not K1's."""
    context, positions = Context(900, kv_heads=1, group=2), np.arange(700, 900, 20)
    q, config = context.queries(len(positions)) * 8, SparseConfig(1, 64, 4, -1)
    blocks, differs = context.select(q, positions, config), 0
    for row, position in enumerate(map(int, positions)):
        right = context.scores(q[row], 0, position)
        assert blocks[row, 0].tolist() == brute.chosen(right, position, config)
        k1 = brute.windows(context.keys(0, position), 32, 16)
        by_k1 = brute.scores(q[row].reshape(2, DIM), k1, k1, SCALE, position // PAGE)
        differs += brute.chosen(by_k1, position, config) != brute.chosen(right, position, config)
    assert differs > 0


@pytest.mark.parametrize("size", [1, 7, 64, 100, 512])
def test_a_choice_is_the_same_bits_in_any_company(size):
    context = Context(512)
    q = context.queries(512)
    whole = context.select(q, np.arange(512), SMALL)
    parts = [context.select(q[i : i + size], np.arange(i, min(i + size, 512)), SMALL) for i in range(0, 512, size)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("config", [SMALL, SparseConfig(2, 128, 5, -1)], ids=str)
def test_only_the_fine_keys_of_blocks_that_compete_are_read(config):
    """Only fine keys of blocks that compete are read, and none of them can depend on a drafted path.

    Entry 4 b + 4 of the last block before the local ones ends 49 tokens or more before the row's own block: no fine
    window that ends within a drafted path (at most 33 tokens) can decide."""
    context, positions = Context(960), np.arange(640, 704)
    q = context.queries(len(positions))
    expected = context.select(q, positions, config)
    own = 640 // PAGE
    context.k1[context.tables[0, own - config.local_blocks], :, 1:] = np.nan
    context.k1[context.tables[0, own - config.local_blocks + 1 :]] = np.nan
    assert np.array_equal(context.select(q, positions, config), expected)


def test_padding_rows_are_left_alone():
    context = Context(512)
    rows = make_rows([511, 511], [-1, 0], context.tables)
    blocks = np.full((2, 2, SMALL.num_selected), UNWRITTEN, np.int32)
    q = context.queries(2)
    context.ops.select_blocks(blocks, q, context.kv, rows, SCALE, SMALL)
    assert (blocks[0] == UNWRITTEN).all()
    assert (blocks[1] != UNWRITTEN).all()


@DTYPES
@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("group", [16, 1])
def test_attention_over_the_chosen_blocks(is_prefill, group, dtype):
    context = Context(450, group=group, dtype=dtype)
    positions = np.arange(430, 450) if is_prefill else np.arange(320, 450, 13)
    q = context.queries(len(positions))
    blocks = context.select(q, positions, SMALL)
    rows = make_rows(positions, np.zeros(len(q), np.int64), context.tables, is_prefill)
    out = np.full(q.shape, np.nan, np.float32)
    attention = context.ops.prefill_attention if is_prefill else context.ops.decode_attention
    attention(out, q, context.kv, rows, SCALE, selection=Selection(blocks, SMALL))
    expected = np.zeros(q.shape)
    for row, position in enumerate(map(int, positions)):
        heads = q[row].reshape(2, group, DIM)
        values = gather(context.v_pages, context.tables[0], position + 1)
        for head in range(2):
            keys, chosen = context.keys(head, position), blocks[row, head].tolist()
            by_force = brute.attention(heads[head], keys, values[head], chosen, SCALE)
            expected[row].reshape(2, group, DIM)[head] = by_force
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error <= OPS["decode_attention"].tolerance[dtype]


@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("config", [SparseConfig(1, 64, 7, -1), SparseConfig(1, 64, 2, 512)], ids=["topk", "dense_len"])
def test_with_everything_selected_the_bits_are_those_of_dense_attention(config, is_prefill):
    context, positions = Context(511), np.arange(300, 511)
    q = context.queries(len(positions))
    blocks = context.select(q, positions, config)
    assert (blocks == UNWRITTEN).all()
    rows = make_rows(positions, np.zeros(len(q), np.int64), context.tables, is_prefill)
    attention = context.ops.prefill_attention if is_prefill else context.ops.decode_attention
    outs = [np.full(q.shape, np.nan, np.float32) for _ in range(2)]
    for out, selection in zip(outs, (None, Selection(blocks, config)), strict=True):
        attention(out, q, context.kv, rows, SCALE, selection=selection)
    assert np.array_equal(*outs)
    assert np.isfinite(outs[0]).all()


class Tree:
    """A slot of `base` tokens with drafted nodes behind them, and for each node the plain slot of its path."""

    def __init__(self, base: int, parents: list[int], seed: int = 0):
        count = len(parents)
        self.plain = Context(base + count, seed=seed)
        self.base, self.paths = base, list[list[int]]()
        for node, parent in enumerate(parents):
            self.paths.append([*(self.paths[parent] if node else []), node])
        self.masks = np.array([sum(1 << i for i in path) for path in self.paths], np.uint64)
        self.positions = np.array([base + len(path) - 1 for path in self.paths])
        self.q = self.plain.queries(count)
        # The tree's slot holds what the plain one does, but no compressed key of a window that ends in the tree.
        tree = self.tree = Context(base + count, seed=seed)
        tree.length = base
        tree.compress()
        rows = make_rows(self.positions, np.zeros(count, np.int64), tree.tables)
        self.rows = replace(
            rows, locations=base + np.arange(count), tree_masks=self.masks, tree_base=np.full(count, base, np.int32)
        )

    def path_context(self, node: int) -> Context:
        """Return a plain slot in which the path's keys and values are moved to their positions and compressed."""
        context, path = self.plain, self.paths[node]
        moved = Context(self.base + len(path), seed=1)
        moved.tables, moved.length = context.tables, self.base + len(path)
        moved.k_pages, moved.v_pages = context.k_pages.copy(), context.v_pages.copy()
        for place, location in enumerate(path):
            to, source = self.base + place, self.base + location
            for pages, old in ((moved.k_pages, context.k_pages), (moved.v_pages, context.v_pages)):
                pages[context.tables[0, to // PAGE], :, to % PAGE] = old[
                    context.tables[0, source // PAGE], :, source % PAGE
                ]
        moved.compress()
        return moved


@examples(25)
@given(base=st.integers(330, 460), parents=st.lists(st.integers(0, 100), max_size=40), wide=st.booleans())
def test_a_row_of_a_tree_chooses_and_attends_as_the_plain_row_of_its_path(base, parents, wide):
    """A tree's row has the bits of the plain row of its path, also where windows of both kinds end in the path."""
    parents = [0, *(parent % (node + 1) if wide else node for node, parent in enumerate(parents))]
    tree = Tree(base, parents)
    blocks = np.full((len(parents), 2, SMALL.num_selected), UNWRITTEN, np.int32)
    slot, ops = tree.tree, tree.tree.ops
    ops.select_blocks(blocks, tree.q, slot.kv, tree.rows, SCALE, SMALL)
    out = np.full(tree.q.shape, np.nan, np.float32)
    ops.decode_attention(out, tree.q, slot.kv, tree.rows, SCALE, selection=Selection(blocks, SMALL))
    for node in {0, len(parents) // 2, len(parents) - 1}:
        plain, position = tree.path_context(node), tree.positions[node]
        expected = plain.select(tree.q[node : node + 1], [position], SMALL)
        assert np.array_equal(blocks[node : node + 1], expected)
        rows = make_rows([position], [0], plain.tables)
        alone = np.full((1, out.shape[1]), np.nan, np.float32)
        selection = Selection(expected, SMALL)
        ops.decode_attention(alone, tree.q[node : node + 1], plain.kv, rows, SCALE, selection=selection)
        assert np.array_equal(out[node], alone[0])


@pytest.mark.parametrize("use_nope", [False, True])
def test_an_accepted_path_is_compressed_where_it_moves(use_nope):
    """An accepted path of every second node is compressed at its final positions, over ends of both windows."""
    tree = Tree(440, [0, *range(0, 19)])
    for node in range(1, 20, 2):
        tree.paths[node] = [*range(0, node, 2), node]
    path, context = tree.paths[19], tree.tree
    moved = tree.path_context(19)
    # With NoPE the keys before RoPE are compressed, so arbitrary others stand in for those after RoPE.
    keys, others = context.k_pages, context.v_pages.copy()
    caches = [others, context.v_pages, keys] if use_nope else [keys, context.v_pages]
    pages = KVPages(caches[0], caches[1], CompressedKeys(context.k1, context.k2, keys if use_nope else None))
    keep_path([cache[None] for cache in caches], [pages], context.tables[0], tree.base, path, context.dtype)
    num_tokens = tree.base + len(path)
    assert num_tokens == 451
    assert np.array_equal(gather(keys, context.tables[0], num_tokens), moved.keys_of_all(num_tokens))
    assert np.array_equal(context.k1, moved.k1, equal_nan=True)
    assert np.array_equal(context.k2, moved.k2, equal_nan=True)


def test_the_coarse_window_that_ends_in_the_path_counts():
    """In chains over the end of a block the coarse window that ends there counts: without it some choices differ."""
    differs = False
    for seed in range(4):
        tree = Tree(440, list(range(-1, 12)), seed)
        assert tree.positions[-1] == 452
        slot = tree.tree
        tree.q *= 4
        blocks = np.zeros((13, 2, SMALL.num_selected), np.int32)
        slot.ops.select_blocks(blocks, tree.q, slot.kv, tree.rows, SCALE, SMALL)
        for node in range(8, 13):
            position = int(tree.positions[node])
            for head in range(2):
                right = tree.plain.scores(tree.q[node], head, position)
                brute.check_choice(blocks[node, head], right, position, SMALL, 1e-5)
                keys, heads = tree.plain.keys(head, position), tree.q[node].reshape(2, 4, DIM)
                k1, k2 = brute.windows(keys, 32, 16), brute.windows(keys, 128, 64)
                late = brute.scores(heads[head], k1, k2[:-1], SCALE, position // PAGE)
                differs |= brute.chosen(late, position, SMALL) != brute.chosen(right, position, SMALL)
    assert differs
