"""Rows of a draft tree, and windows, in the NumPy ops: against brute force, and bitwise against plain rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from reference import brute_force
from reference.operands import Data, filled_pages, make_rows

from cpmrt.dtypes import DType
from cpmrt.ops import OPS, KVPages, Rows
from cpmrt.reference.ops import NumpyOps

PAGE, GROUP, KV_HEADS, HEAD_DIM, SCALE = 64, 2, 2, 64, 0.125
BASES = [0, 1, 30, 63, 64, 65, 127]


def random_tree(rng: Any, num_nodes: int) -> list[int]:
    """Return the masks of a random tree's nodes; node 0 is the root, parents come first."""
    masks = [1]
    for node in range(1, num_nodes):
        masks.append(masks[int(rng.integers(0, node))] | 1 << node)
    return masks


def tree_rows(masks: list[int], base: int, slot: int, tables: Any) -> Rows:
    positions = [base + mask.bit_count() - 1 for mask in masks]
    rows = make_rows(positions, [slot] * len(masks), tables)
    return replace(rows, tree_masks=np.array(masks, np.uint64), tree_base=np.full(len(masks), base))


def path_of(mask: int, base: int) -> list[int]:
    """Return the locations that a row sees, in the order of its path."""
    return [*range(base), *(base + bit for bit in range(64) if mask >> bit & 1)]


def attend(q: Any, pages: Any, rows: Rows, window: int = 0, dtype: DType = DType.FLOAT32) -> Any:
    out = np.full_like(q, np.nan)
    NumpyOps(dtype).decode_attention(out, q, KVPages(*pages), rows, SCALE, window)
    return out


def alone(q: Any, pages: Any, table: Any, places: list[int], window: int = 0, dtype: DType = DType.FLOAT32) -> Any:
    """Return attention of the row as a plain one, over a copy of its path's keys and values at successive positions."""
    copies = [np.full_like(page, np.nan) for page in pages]
    for copy, page in zip(copies, pages, strict=True):
        for position, place in enumerate(places):
            copy[table[position // PAGE], :, position % PAGE] = page[table[place // PAGE], :, place % PAGE]
    return attend(q[None], copies, make_rows([len(places) - 1], [0], table[None]), window, dtype)[0]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("window", [0, 1, 5, 64])
def test_a_tree_against_brute_force_and_bitwise_against_its_paths(base: int, window: int) -> None:
    data = Data(DType.BFLOAT16, seed=base)
    masks, tables = [*random_tree(data.random, 20), 2**64 - 1], data.tables(2, 4)
    pages = filled_pages(data, tables, [0, base + 64], KV_HEADS, HEAD_DIM)
    rows, q = tree_rows(masks, base, 1, tables), data(len(masks), GROUP * KV_HEADS * HEAD_DIM)
    out = attend(q, pages, rows, window, DType.BFLOAT16)
    seen = [path_of(mask, base)[-window:] for mask in masks]
    expected = brute_force.attention(q, *pages, rows.positions, rows.slots, tables, SCALE, seen)
    assert np.linalg.norm(out - expected) <= OPS["decode_attention"].tolerance[DType.BFLOAT16] * np.linalg.norm(
        expected
    )
    for row, mask in enumerate(masks):
        same = alone(q[row], pages, tables[1], path_of(mask, base), window, DType.BFLOAT16)
        assert np.array_equal(out[row], same), row


@examples(30)
@given(st.data())
def test_any_mix_of_tree_and_plain_rows(drawn: Any) -> None:
    """Any mix of rows is right; a plain row among those of trees has a mask of one bit and its position as base."""
    data = Data(seed=drawn.draw(st.integers(0, 2**32 - 1)))
    bases = drawn.draw(st.lists(st.integers(0, 130), min_size=1, max_size=3))
    tables, parts = data.tables(len(bases), 4), []
    pages = filled_pages(data, tables, [base + 64 for base in bases], KV_HEADS, HEAD_DIM)
    for slot, base in enumerate(bases):
        parts.append(tree_rows(random_tree(data.random, drawn.draw(st.integers(1, 16))), base, slot, tables))
    fields = ("token_ids", "positions", "slots", "tree_masks", "tree_base")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in fields}
    order = data.random.permutation(len(joined["slots"]))
    rows = replace(parts[0], **{name: values[order] for name, values in joined.items()})
    q = data(len(order), GROUP * KV_HEADS * HEAD_DIM)
    out = attend(q, pages, rows)
    plain = replace(rows, tree_masks=None, tree_base=None)
    for row, (mask, base) in enumerate(zip(rows.tree_masks, rows.tree_base, strict=True)):
        slot = rows.slots[row]
        assert np.array_equal(out[row], alone(q[row], pages, tables[slot], path_of(int(mask), int(base)))), row
        if mask == 1:
            assert np.array_equal(out[row], attend(q, pages, plain)[row])


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 130, 1000])
def test_a_window_in_decode(window: int) -> None:
    data, positions = Data(), np.array([0, 1, 63, 64, 99, 128])
    tables = data.tables(1, 3)
    pages = filled_pages(data, tables, [129], KV_HEADS, HEAD_DIM)
    q, slots = data(len(positions), GROUP * KV_HEADS * HEAD_DIM), np.zeros(len(positions), int)
    seen = [range(max(position - window + 1, 0), position + 1) for position in positions]
    expected = brute_force.attention(q, *pages, positions, slots, tables, SCALE, seen)
    out = attend(q, pages, make_rows(positions, slots, tables), window)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    if window > 128:
        assert np.array_equal(out, attend(q, pages, make_rows(positions, slots, tables)))


@pytest.mark.parametrize("window", [1, 5, 64, 70, 1000])
@pytest.mark.parametrize(("start", "count"), [(0, 9), (60, 8), (100, 70), (-1, 6), (-1, 1)])
def test_a_window_in_prefill(window: int, start: int, count: int) -> None:
    data, positions = Data(), np.arange(start, start + count)
    tables = data.tables(2, 3)
    pages = filled_pages(data, tables, [0, start + count], KV_HEADS, HEAD_DIM)
    q, slots = data(count, GROUP * KV_HEADS * HEAD_DIM), np.ones(count, int)
    out, first = np.full_like(q, 7.0), int(start < 0)
    rows = make_rows(positions, np.where(positions < 0, -1, slots), tables, True)
    NumpyOps(DType.FLOAT32).prefill_attention(out, q, KVPages(*pages), rows, SCALE, window)
    seen = [range(max(position - window + 1, 0), position + 1) for position in positions[first:]]
    if count == first:
        return  # the only row is the one before the sequence
    operands = q[first:], *pages, positions[first:], slots[first:], tables, SCALE, seen
    np.testing.assert_allclose(out[first:], brute_force.attention(*operands), rtol=1e-4, atol=1e-5)
