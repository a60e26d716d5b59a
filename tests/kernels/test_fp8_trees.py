"""Draft trees over pages in fp8: storing nodes, rows that read them, and accepting paths."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import AttentionDevice, uploaded
from fp8_store import Store
from sparse_cases import SMALL, Slots, SparseDevice
from tree_cases import assert_same_bits, make_fp8_tree, random_tree

from cpmrt.cuda.draft.structs import DRAFT_TREE
from cpmrt.cuda.ops.kv import accept_nodes, compress_path
from cpmrt.dtypes import DType, from_float32
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import CompressedKeys, Fp8Pages, KVPages
from cpmrt.reference import fp8_pages
from cpmrt.reference.sparse_attention import append_compressed

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
SHAPES = [
    (DType.BFLOAT16, 16, 2, 128), (DType.FLOAT16, 8, 2, 64), (DType.BFLOAT16, 5, 1, 96), (DType.FLOAT16, 20, 1, 128),
]  # fmt: skip
KERNELS = ("accept_nodes",)


# ---- storing ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "base"), [(128, 0), (128, 50), (64, 63), (96, 64), (128, 65), (64, 127)])
def test_nodes_are_stored_as_plain_rows_of_their_path_would_be(
    cuda: Any, dtype: DType, head_dim: int, base: int
) -> None:
    """A node's codes, scales and query have the bits of a plain row of its path; pages keep what they had, and padding
    stores nothing."""
    count, rng = 40, np.random.default_rng(base)
    masks = random_tree(rng, count, keep=0.2)
    store = Store(cuda, dtype, head_dim)
    before = list(range(base))
    if before:
        store.append(before, before, [1] * base)
    pages = store.pages()
    queries, nodes = store.append_tree(list(range(base, base + count)), masks, slot=1, base=base)
    for part, kept in zip(store.pages(), pages, strict=True):
        assert np.array_equal(part.codes, kept.codes) and np.array_equal(part.scales, kept.scales)
    for node in (0, 1, 7, 20, count - 1):
        path = fp8_pages.path_of(masks[node])
        alone, rows = Store(cuda, dtype, head_dim), [*before, *(base + other for other in path)]
        expected_queries = alone.append(rows, list(range(len(rows))), [1] * len(rows))
        assert np.array_equal(queries[node], expected_queries[-1]), node
        page, offset = alone.table[1, (len(rows) - 1) // PAGE_SIZE], (len(rows) - 1) % PAGE_SIZE
        for part, expected in zip(nodes, alone.pages(), strict=True):
            assert np.array_equal(part.nodes[node], expected.codes[page, :, offset]), node
            assert np.array_equal(part.node_scales[node], expected.scales[page]), node
    for part in nodes:
        assert (part.nodes[count] == 0x7F).all() and np.isnan(part.node_scales[count]).all()


# ---- reading ----


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
@pytest.mark.parametrize("base", [0, 1, 16, 47, 62, 63, 64, 65, 127, 130])
def test_bases_around_page_edges(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, base: int, portable: bool
) -> None:
    masks = random_tree(np.random.default_rng(base), 21, keep=0.2)
    tree, plain = make_fp8_tree(dtype, group, kv_heads, head_dim, (base, masks), nodes_of_array=21)
    assert_same_bits(cuda, tree, plain, portable=portable, counts=(1, 5))


@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (8, 64), (5, 96)])
@pytest.mark.parametrize("base", [63, 510, 1020, 2044])
def test_trees_of_64_nodes(cuda: Any, group: int, head_dim: int, base: int) -> None:
    """A node's row has the bits of a plain row of its path at every cut of pages: runs become longer from 9 and from 17
    pages on; from 33 there are more than eight, of several clusters."""
    masks = random_tree(np.random.default_rng(base), 63, keep=0.1)
    tree, plain = make_fp8_tree(DType.BFLOAT16, group, 2, head_dim, (base, [*masks, 2**64 - 1]))
    assert_same_bits(cuda, tree, plain, counts=(2, 8, 12, 16, 24, 32), oracle_every=16)


@pytest.mark.parametrize(("portable", "sms"), [(False, 132), (False, 8), (True, 2)])
@pytest.mark.parametrize("base", [2048, 8127])
def test_long_contexts(cuda: Any, base: int, portable: bool, sms: int) -> None:
    """Rows of trees have the bits of plain rows also where, with few splits, a run has more pages than a warp looks up
    at a time, and where, with few multiprocessors, runs take turns."""
    masks = random_tree(np.random.default_rng(base), 20, keep=0.1)
    tree, plain = make_fp8_tree(DType.FLOAT16, 16, 2, 64, (base, masks))
    assert_same_bits(cuda, tree, plain, portable=portable, sms=sms, counts=(1, 3, 12), oracle_every=8)


def test_rows_do_not_read_what_other_branches_hold(cuda: Any) -> None:
    """A node's row is the same when the nodes beside its path are NaN."""
    masks = [1, 0b11, 0b101, 0b1101, 0b10011]
    tree, plain = make_fp8_tree(DType.BFLOAT16, 16, 2, 128, (62, masks))
    expected = AttentionDevice(cuda, plain).run(plain)
    for row, mask in enumerate(masks):
        case = tree.row(row)
        for part in (case.k_pages, case.v_pages):
            others = [node for node in range(64) if not mask >> node & 1]
            part.nodes[others], part.node_scales[others] = 0x7F, np.nan
        assert np.array_equal(AttentionDevice(cuda, case).run(case, pdl=True), expected[[row]])
        tree, _ = make_fp8_tree(DType.BFLOAT16, 16, 2, 128, (62, masks))


def test_padding_rows_become_zeros(cuda: Any) -> None:
    tree, plain = make_fp8_tree(DType.BFLOAT16, 16, 2, 128, (100, random_tree(np.random.default_rng(2), 20)))
    expected = AttentionDevice(cuda, plain).run(plain)
    tree.slots[[15, 17]], tree.positions[15], tree.tree_base[15], tree.tree_masks[17] = -1, 0, 0, 1
    out = AttentionDevice(cuda, tree).run(tree)
    kept = [row for row in range(20) if row not in (15, 17)]
    assert not out[[15, 17]].any() and np.array_equal(out[kept], expected[kept])


# ---- accepting ----


def tree_struct(cuda: Any, slot: int, root: int, path: list[int]) -> Any:
    tree = np.zeros(1, DRAFT_TREE)
    tree["slot"], tree["position"], tree["path_length"] = slot, root, len(path)
    tree["path"][0, : len(path)] = path
    return cuda.array(tree.view(np.uint8))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("root", "path"), [(0, [0]), (60, [0, 1, 5, 6, 9, 12]), (64, [0, 3]), (1, list(range(64)))])
def test_an_accepted_path_in_every_layer(cuda: Any, head_dim: int, root: int, path: list[int]) -> None:
    """An accepted path's codes go to their positions and new pages get scales, in keys and values of every layer;
    nothing else changes."""
    rng, layers, pages, kv_heads = np.random.default_rng(root), 3, 5, 2
    tables = np.array([[0] * 3, [4, 1, 3]], np.int32)
    shapes = (layers, pages, kv_heads, PAGE_SIZE, head_dim), (layers, pages, kv_heads)
    beside = (layers, 64, kv_heads, head_dim), (layers, 64, kv_heads)
    made = [
        Fp8Pages(*(
            rng.integers(0, 256, shape, np.uint8) if len(shape) > 3 else rng.random(shape, np.float32)
            for shape in (*shapes, *beside)
        ))
        for _ in "kv"
    ]  # fmt: skip
    device = [uploaded(cuda, part) for part in made]
    block_tables = cuda.array(tables)
    for slot in (-1, 1):
        tree = tree_struct(cuda, slot, root, path)
        accept_nodes(cuda.launcher(DType.BFLOAT16), KVPages(*device), tree, block_tables, 1, 64)
        for part, expected in zip(device, made, strict=True):
            for layer in range(layers if slot >= 0 else 0):
                of_layer = Fp8Pages(*(
                    array[layer] for array in (expected.codes, expected.scales, expected.nodes, expected.node_scales)
                ))  # fmt: skip
                fp8_pages.accept_nodes(of_layer, tables[1], root, path)
            np.testing.assert_array_equal(cuda.numpy(part.codes), expected.codes)
            np.testing.assert_array_equal(cuda.numpy(part.scales), expected.scales)


def test_accepted_paths_of_two_trees(cuda: Any) -> None:
    """Each tree's path is taken from its own nodes, which lie behind those of the tree before, into its own slot."""
    rng, tables, paths = np.random.default_rng(6), np.array([[0, 2], [4, 1], [3, 5]], np.int32), ([0, 1, 4], [0, 2])
    shapes = ((2, 6, 2, PAGE_SIZE, 64), (2, 6, 2), (2, 10, 2, 64), (2, 10, 2))
    made = [
        Fp8Pages(*(
            rng.integers(0, 256, shape, np.uint8) if len(shape) > 3 else rng.random(shape, np.float32)
            for shape in shapes
        ))
        for _ in "kv"
    ]  # fmt: skip
    trees = np.zeros(2, DRAFT_TREE)
    for index, (slot, root) in enumerate(((2, 62), (0, 63))):
        trees[index]["slot"], trees[index]["position"] = slot, root
        trees[index]["path_length"], trees[index]["path"][: len(paths[index])] = len(paths[index]), paths[index]
    device = [uploaded(cuda, part) for part in made]
    launcher = cuda.launcher(DType.BFLOAT16)
    accept_nodes(launcher, KVPages(*device), cuda.array(trees.view(np.uint8)), cuda.array(tables), 2, 5)
    for part, expected in zip(device, made, strict=True):
        for layer in range(2):
            for index, (slot, root) in enumerate(((2, 62), (0, 63))):
                nodes = (array[layer, 5 * index :] for array in (expected.nodes, expected.node_scales))
                of_tree = Fp8Pages(expected.codes[layer], expected.scales[layer], *nodes)
                fp8_pages.accept_nodes(of_tree, tables[slot], root, paths[index])
        np.testing.assert_array_equal(cuda.numpy(part.codes), expected.codes)
        np.testing.assert_array_equal(cuda.numpy(part.scales), expected.scales)


# ---- sparse attention ----


@pytest.mark.parametrize(("root", "length"), [(14, 1), (15, 1), (40, 33), (100, 28), (127, 1), (130, 64)])
@pytest.mark.parametrize(("dtype", "kv_heads", "head_dim"), [(DType.BFLOAT16, 2, 128), (DType.FLOAT16, 1, 64)])
def test_compressed_keys_of_an_accepted_path(
    cuda: Any, dtype: DType, kv_heads: int, head_dim: int, root: int, length: int
) -> None:
    layers = [Slots(dtype, [256], group=1, kv_heads=kv_heads, head_dim=head_dim, seed=seed) for seed in range(3)]
    for layer in layers:
        layer.tables = layers[0].tables
        layer.set_tokens(0, *(layer.normal(256, kv_heads, head_dim) for _ in "kv"))
        layer.quantise()
        layer.compress([root])
    expected = [np.stack([getattr(layer, name) for layer in layers]) for name in ("k1", "k2")]
    keys = Fp8Pages(*(np.stack([getattr(layer.pages["k"], name) for layer in layers]) for name in ("codes", "scales")))
    arrays = [cuda.array(values, dtype) for values in expected]
    compress_path(
        cuda.launcher(dtype), KVPages(uploaded(cuda, keys), None, CompressedKeys(*arrays)),
        tree_struct(cuda, 0, root, list(range(length))), cuda.array(layers[0].tables), 1,
    )  # fmt: skip
    for number, layer in enumerate(layers):
        k1, k2 = (values[number] for values in expected)
        append_compressed(k1, k2, layer.k_pages, layer.tables[0], range(root, root + length), dtype)
    for array, values in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(cuda.numpy(array), from_float32(values, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("base", [383, 384, 420, 447, 448])
def test_sparse_rows_of_a_tree_are_the_plain_rows_of_their_path(
    cuda: Any, dtype: DType, base: int, portable: bool
) -> None:
    """A node's row chooses the blocks of the plain row of its path, and its attention has the same bits."""
    rng, count, kv_heads, head_dim = np.random.default_rng(base), 40, 2, 64
    masks = random_tree(rng, count, keep=0.25)
    slots = Slots(dtype, [base], group=16, kv_heads=kv_heads, head_dim=head_dim)
    slots.quantise()
    heads = {name: slots.normal(count, kv_heads, head_dim) for name in "kv"}
    columns = {"tree_masks": np.array(masks, np.uint64), "tree_base": np.full(count, base, np.int32)}
    positions = np.array([base + mask.bit_count() - 1 for mask in masks])
    rows = slots.rows(positions, np.zeros(count), locations=np.arange(base, base + count, dtype=np.int32), **columns)
    assert slots.pages is not None
    for name, part in slots.pages.items():
        nodes = np.full((count, kv_heads, head_dim), 0x7F, np.uint8)
        slots.pages[name] = Fp8Pages(part.codes, part.scales, nodes, np.full((count, kv_heads), np.nan, np.float32))
        fp8_pages.store_nodes(slots.pages[name], rows, heads[name])
    device, q = SparseDevice(cuda, slots, SMALL, portable=portable), slots.queries(count, 3.0)
    blocks = device.select(q, rows)
    out = device.attend(q, rows, blocks)
    for node in (0, 7, 20, count - 1):
        path = fp8_pages.path_of(masks[node])
        alone = slots.rows(positions[node : node + 1], [0])
        plain = accepted(slots, base, path)
        single = SparseDevice(cuda, plain, SMALL, portable=portable)
        chosen = single.select(q[node : node + 1], alone)
        assert np.array_equal(chosen[0], blocks[node]), node
        assert np.array_equal(single.attend(q[node : node + 1], alone, chosen)[0], out[node]), node


def accepted(slots: Slots, base: int, path: list[int]) -> Slots:
    """Return a copy of the slots after the path is accepted."""
    plain = copy.copy(slots)
    assert slots.pages is not None
    plain.pages = {}
    for name, part in slots.pages.items():
        kept = replace(part, codes=part.codes.copy(), scales=part.scales.copy())
        fp8_pages.accept_nodes(kept, slots.tables[0], base, path)
        plain.pages[name] = kept
        setattr(plain, f"{name}_pages", fp8_pages.values_of(kept, np.arange(len(kept.codes))))
    plain.lengths = [base + len(path)]
    plain.compress(plain.lengths)
    return plain
