"""Rows of draft trees for decode_attention, and the same rows as plain ones: their results must have the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from attention_cases import AttentionDevice, Case, assert_close, make_case, oracle

from cpmrt.dtypes import DType
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.ops import Fp8Pages, Rows
from cpmrt.reference.fp8_pages import path_of, store, store_nodes

Tree = tuple[int, list[int]]
"""A tree: the number of tokens before it, and the mask of each node."""


def random_tree(rng: Any, num_nodes: int, keep: float = 1.0) -> list[int]:
    """Return the masks of a random tree's nodes, parents first; `keep` below 1 gives later parents and longer paths."""
    masks = [1]
    for node in range(1, num_nodes):
        masks.append(masks[int(rng.integers(int(node * (1 - keep)), node))] | 1 << node)
    return masks


def make_trees(dtype: DType, group: int, kv_heads: int, head_dim: int, trees: list[Tree]) -> tuple[Case, Case]:
    """Return the rows of all trees, each tree in its slot, and the same rows as plain ones with slots of their own.

    A plain row's slot has a copy of the keys and values of its path.
    """
    nodes = [(slot, base, mask) for slot, (base, masks) in enumerate(trees) for mask in masks]
    lengths = [base + 64 for base, _ in trees] + [base + mask.bit_count() for _, base, mask in nodes]
    case = make_case(dtype, group, kv_heads, head_dim, lengths)
    plain = case.take(list(range(len(trees), len(lengths))))
    for (slot, base, mask), copy in zip(nodes, plain.slots, strict=True):
        places = np.array([*range(base), *(base + bit for bit in range(64) if mask >> bit & 1)])
        for pages in (case.k_pages, case.v_pages):
            path = pages[case.block_tables[slot, places // PAGE_SIZE], :, places % PAGE_SIZE]
            at = np.arange(len(places))
            pages[case.block_tables[copy, at // PAGE_SIZE], :, at % PAGE_SIZE] = path
    slots, bases, masks = zip(*nodes, strict=True)
    columns = {"tree_masks": np.array(masks, np.uint64), "tree_base": np.array(bases, np.int32)}
    return replace(plain, slots=np.array(slots, np.int32), **columns), plain


def make_fp8_tree(
    dtype: DType, group: int, kv_heads: int, head_dim: int, tree: Tree, nodes_of_array: int = 64
) -> tuple[Case, Case]:
    """Return what `make_trees` returns for one tree, with keys and values in fp8.

    Tokens have very different magnitudes; entries that nobody stored are NaN.
    """
    base, masks = tree
    rng = np.random.default_rng(base)
    case = make_case(dtype, group, kv_heads, head_dim, [base + 64, *(base + mask.bit_count() for mask in masks)])
    plain = case.take(list(range(1, len(masks) + 1)))
    columns = {"tree_masks": np.array(masks, np.uint64), "tree_base": np.full(len(masks), base, np.int32)}
    rows = Rows(
        np.zeros(len(masks), np.int32), plain.positions, np.zeros(len(masks), np.int32), case.block_tables, False, None,
        **columns,
    )  # fmt: skip
    parts = []
    for pages in (case.k_pages, case.v_pages):
        scales, node_scales = (np.full((count, kv_heads), np.nan, np.float32) for count in (len(pages), nodes_of_array))
        nodes = np.full((nodes_of_array, kv_heads, head_dim), 0x7F, np.uint8)
        part = Fp8Pages(np.full(pages.shape, 0x7F, np.uint8), scales, nodes, node_scales)
        heads = rng.standard_normal((base + len(masks), kv_heads, head_dim), np.float32)
        heads *= 2.0 ** rng.integers(-3, 3, (len(heads), 1, 1)).astype(np.float32)
        before, tables = np.arange(base), case.block_tables
        store(part, tables[0, before // PAGE_SIZE], before % PAGE_SIZE, heads[:base])
        shared = pages_for(base)
        for copy, mask in zip(plain.slots, masks, strict=True):
            for array in (part.codes, part.scales):
                array[tables[copy, :shared]] = array[tables[0, :shared]]
            path = path_of(mask)
            places = base + np.arange(len(path))
            store(part, tables[copy, places // PAGE_SIZE], places % PAGE_SIZE, heads[base:][path])
        store_nodes(part, rows, heads[base:])
        parts.append(part)
    plain = replace(plain, k_pages=parts[0], v_pages=parts[1])
    return replace(plain, slots=rows.slots, **columns), plain


def assert_same_bits(
    cuda: Any, tree: Case, plain: Case, *, portable: bool = False, window: int = 0, counts: tuple[int, ...] = (),
    sms: int = 132, oracle_every: int = 1,
) -> None:  # fmt: skip
    """Check that rows of trees have the bits of plain rows: all of them together, and the first `counts` ones.

    Every `oracle_every`-th plain row is compared with the NumPy op too, which is slow over long contexts.
    """
    launcher = AttentionDevice(cuda, tree, portable=portable, sms=sms)
    expected = launcher.run(plain, window=window)
    some = list(range(0, len(plain.q), oracle_every))
    assert_close(expected[some], oracle(plain.take(some), window), plain.dtype)
    for count in (len(tree.q), *counts):
        rows = list(range(count))
        out = launcher.run(tree.take(rows), window=window, pdl=count % 2 == 0)
        assert np.array_equal(out, expected[rows]), (
            f"{count} rows: {np.flatnonzero((out != expected[rows]).any(axis=1))}"
        )
