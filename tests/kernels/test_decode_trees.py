"""decode_attention over draft trees: a node's row has the bits of a plain row over the same path. Also attention
windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import AttentionDevice, assert_close, make_case, oracle
from tree_cases import assert_same_bits, make_trees, random_tree

from cpmrt.dtypes import DType
from cpmrt.memory.caches import PAGE_SIZE

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
EDGES = [0, 1, 15, 16, 17, 48, 62, 63, 64, 65, 127, 130]


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize(
    ("dtype", "group", "kv_heads", "head_dim"),
    [
        (DType.BFLOAT16, 16, 2, 128),
        (DType.FLOAT16, 16, 2, 128),
        (DType.FLOAT16, 5, 1, 96),
        (DType.BFLOAT16, 1, 2, 64),
        (DType.BFLOAT16, 20, 1, 128),
    ],
    ids=str,
)
def test_bases_around_page_edges(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, portable: bool
) -> None:
    rng = np.random.default_rng(head_dim)
    trees = [(base, random_tree(rng, 5)) for base in EDGES]
    assert_same_bits(cuda, *make_trees(dtype, group, kv_heads, head_dim, trees), portable=portable, counts=(1, 5, 16))


@pytest.mark.parametrize("base", [*EDGES, 1000, 2040])
def test_trees_of_64_nodes(cuda: Any, base: int) -> None:
    rng = np.random.default_rng(base)
    masks = random_tree(rng, 64, keep=1.0 if base % 2 else 0.1)
    few = masks if base < 200 else [*masks[:6], *masks[-6:], 2**64 - 1]
    tree, plain = make_trees(DType.BFLOAT16, 16, 2, 128, [(base, few)])
    assert_same_bits(cuda, tree, plain, counts=(1, 2, 12))


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("base", [2047, 2048, 4990])
def test_long_contexts(cuda: Any, base: int, portable: bool) -> None:
    """With 12 rows each row has one cluster of blocks, which takes the row's runs in turns; with few rows there is a
    cluster for every eight runs."""
    masks = [1, 0b11, 0b101, 0b1101, 1 << 63 | 1, 2**64 - 1] * 2
    tree, plain = make_trees(DType.FLOAT16, 16, 2, 64, [(base, masks)])
    assert_same_bits(cuda, tree, plain, portable=portable, counts=(1, 2, 5))
    launcher = AttentionDevice(cuda, tree, portable=portable)
    together, alone = launcher.run(tree), [launcher.run(tree.row(row)) for row in range(len(masks))]
    assert np.array_equal(np.concatenate(alone), together)


@pytest.mark.parametrize("window", [1, 7, 64, 100, 1500])
def test_a_window_counts_positions_of_the_path(cuda: Any, window: int) -> None:
    rng = np.random.default_rng(window)
    trees = [(base, random_tree(rng, 6, keep=0.5)) for base in (0, 3, 63, 70, 1000, 2100)]
    tree, plain = make_trees(DType.BFLOAT16, 16, 2, 128, trees)
    assert_same_bits(cuda, tree, plain, window=window, counts=(1, 9))


def test_plain_rows_among_those_of_trees(cuda: Any) -> None:
    """A plain row in a step of trees has a mask of one bit and its position as its base; a step may have several of a
    slot."""
    trees = [(100, [1, 3, 5]), (64, [1]), (0, [1, 3]), (2000, [1])]
    tree, plain = make_trees(DType.BFLOAT16, 8, 2, 64, trees)
    waiting = np.arange(95, 101, dtype=np.int32)
    rows = [0] * len(waiting)
    chain = replace(tree.take(rows), positions=waiting, tree_masks=np.ones(len(rows), np.uint64), tree_base=waiting)
    launcher = AttentionDevice(cuda, tree)
    expected = launcher.run(replace(chain, tree_masks=None, tree_base=None))
    assert np.array_equal(launcher.run(chain, pdl=True), expected)
    assert_same_bits(cuda, tree, plain, counts=(4,))


def test_padding_rows_become_zeros(cuda: Any) -> None:
    tree, plain = make_trees(DType.BFLOAT16, 16, 2, 128, [(100, [1, 3, 5, 9, 27])])
    expected = AttentionDevice(cuda, tree).run(plain)
    tree.slots[[1, 3]], tree.positions[1], tree.tree_base[1], tree.tree_masks[3] = -1, 10**9, 10**9, 0
    out = AttentionDevice(cuda, tree).run(tree)
    assert not out[[1, 3]].any()
    assert np.array_equal(out[[0, 2, 4]], expected[[0, 2, 4]])


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 64, 65, 1000, 4096])
def test_a_window_of_plain_rows(cuda: Any, dtype: DType, window: int, portable: bool) -> None:
    """Pages that lie wholly before a row's window are not read; keys before the window in its first page do not
    count."""
    case = make_case(dtype, 16, 2, 128, [1, 2, 63, 64, 65, 128, 1000, 2048, 2112, 5000])
    for slot, position in enumerate(case.positions):
        first = max(position + 1 - window, 0)
        hidden = np.arange(first)
        pages, offsets = case.block_tables[slot, hidden // PAGE_SIZE], hidden % PAGE_SIZE
        case.k_pages[pages, :, offsets], case.v_pages[pages, :, offsets] = 9.0, 1e4
        before = case.block_tables[slot, : first // PAGE_SIZE]
        case.k_pages[before], case.v_pages[before] = np.nan, np.nan
    launcher = AttentionDevice(cuda, case, portable=portable)
    out = launcher.run(case, window=window)
    readable = replace(case, k_pages=np.nan_to_num(case.k_pages), v_pages=np.nan_to_num(case.v_pages))
    assert_close(out, oracle(readable, window), dtype)
    for row in (0, 3, 9):
        assert np.array_equal(launcher.run(case.row(row), window=window, pdl=True), out[[row]])
