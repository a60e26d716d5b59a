"""Attention over chosen blocks: against the NumPy op, and with the bits of dense attention where all blocks are
chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sparse_cases import SMALL, Slots, SparseDevice, any_choice, expected_attention

from cpmrt.config import SparseConfig
from cpmrt.dtypes import DType
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import OPS

pytestmark = pytest.mark.gpu

KERNELS = ("dense_rows", "selected_attention")
SHAPES = [
    (DType.BFLOAT16, 16, 2, 128), (DType.FLOAT16, 8, 2, 64), (DType.BFLOAT16, 4, 1, 96), (DType.FLOAT16, 1, 3, 64),
    (DType.FLOAT16, 20, 1, 128),
]  # fmt: skip
PORTABLE = pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
WIDE = SparseConfig(1, 1024, 24, 1500)
"""Rows choose 40 blocks, more than one cluster takes; they are dense up to 2560 tokens."""


def assert_close(actual: Any, wanted: Any, dtype: DType) -> None:
    assert np.isfinite(actual).all()
    errors = np.linalg.norm(actual - wanted, axis=1) / np.maximum(np.linalg.norm(wanted, axis=1), 1e-9)
    assert errors.max() <= OPS["decode_attention"].tolerance[dtype], f"row {errors.argmax()}: {errors.max():.2e}"


@PORTABLE
@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
def test_rows_match_the_numpy_op(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, portable: bool
) -> None:
    """Rows around page edges match the op; some rows are dense, one is padding."""
    slots = Slots(dtype, [700, 450], group=group, kv_heads=kv_heads, head_dim=head_dim)
    positions = [0, 100, 254, 255, 256, 257, 319, 320, 321, 447, 5, 448, 640, 699]
    rows = slots.rows(positions, [0, 1, 0, 0, 1, 0, 0, 1, 0, 1, -1, 1, 0, 0])
    q, blocks = slots.queries(len(positions)), any_choice(slots.rng, rows, kv_heads, SMALL)
    out = SparseDevice(cuda, slots, SMALL, portable=portable).attend(q, rows, blocks)
    assert_close(out, expected_attention(slots, q, rows, blocks, SMALL), dtype)


@PORTABLE
@pytest.mark.parametrize("count", [7, 16])
def test_many_blocks(cuda: Any, count: int, portable: bool) -> None:
    """A row with many chosen blocks matches the op and has the bits that it has alone, also among many rows, which have
    one cluster each."""
    slots = Slots(DType.BFLOAT16, [6000], group=16, kv_heads=2, head_dim=128)
    positions = [5999, 2559, 2560, 2561, 4095, 4096, 3000, *range(5000, 5990, 110)][:count]
    rows = slots.rows(positions, np.zeros(count))
    q, blocks = slots.queries(count), any_choice(slots.rng, rows, 2, WIDE)
    device = SparseDevice(cuda, slots, WIDE, portable=portable)
    out = device.attend(q, rows, blocks)
    assert_close(out, expected_attention(slots, q, rows, blocks, WIDE), slots.dtype)
    for row in range(count):
        few = replace(rows, positions=rows.positions[[row]], slots=rows.slots[[row]])
        assert np.array_equal(device.attend(q[[row]], few, blocks[[row]])[0], out[row]), row
    again = SparseDevice(cuda, slots, WIDE, portable=portable, pdl=True)
    assert np.array_equal(again.attend(q, rows, blocks), out)


@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
def test_a_row_alone_has_the_bits_that_it_has_among_others(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int
) -> None:
    """A row alone, for which clusters are launched in pairs of which one, two or more have runs, has its bits among
    others."""
    slots = Slots(dtype, [4200], group=group, kv_heads=kv_heads, head_dim=head_dim)
    rows = slots.rows([4199, 2559, 3000, 900], np.zeros(4))
    q, blocks = slots.queries(4), any_choice(slots.rng, rows, kv_heads, WIDE)
    device = SparseDevice(cuda, slots, WIDE)
    out = device.attend(q, rows, blocks)
    assert_close(out, expected_attention(slots, q, rows, blocks, WIDE), dtype)
    for row in range(4):
        alone = replace(rows, positions=rows.positions[[row]], slots=rows.slots[[row]])
        assert np.array_equal(device.attend(q[[row]], alone, blocks[[row]])[0], out[row]), row


@PORTABLE
@pytest.mark.parametrize("is_prefill", [False, True], ids=["rows", "chunk"])
def test_rows_that_leave_nothing_out_have_the_bits_of_dense_attention(
    cuda: Any, is_prefill: bool, portable: bool
) -> None:
    slots = Slots(DType.FLOAT16, [2560], group=8, kv_heads=2, head_dim=64)
    positions = np.arange(2380, 2560) if is_prefill else np.array([0, 63, 64, 1499, 1500, 2047, 2048, 2500, 2559])
    rows = slots.rows(positions, np.zeros(len(positions)), is_prefill=is_prefill)
    q, blocks = slots.queries(len(positions)), any_choice(slots.rng, rows, 2, WIDE)
    device = SparseDevice(cuda, slots, WIDE, portable=portable)
    assert np.array_equal(device.attend(q, rows, blocks), device.attend(q, rows, None))


@PORTABLE
@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES[:3], ids=str)
@pytest.mark.parametrize(("start", "count"), [(0, 400), (100, 129), (192, 70), (255, 66), (300, 150), (10, 80)])
def test_chunks_match_the_numpy_op(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, start: int, count: int, portable: bool
) -> None:
    """Chunks before, across and behind the switch from dense attention match the op, with padding in the bucket."""
    slots = Slots(dtype, [64, start + count], group=group, kv_heads=kv_heads, head_dim=head_dim)
    padding = 7
    positions = [*range(start, start + count), *[0] * padding]
    rows = slots.rows(positions, [1] * count + [-1] * padding, is_prefill=True)
    q, blocks = slots.queries(len(positions)), any_choice(slots.rng, rows, kv_heads, SMALL)
    out = SparseDevice(cuda, slots, SMALL, max_rows=512, portable=portable).attend(q, rows, blocks)
    assert_close(out[:count], expected_attention(slots, q, rows, blocks, SMALL)[:count], dtype)


@PORTABLE
@pytest.mark.parametrize("base", [383, 384, 385, 440, 447, 448, 500, 511])
def test_a_row_of_a_tree_has_the_bits_of_the_plain_row_of_its_path(cuda: Any, base: int, portable: bool) -> None:
    """A node's row has the bits of the plain row of its path: chosen blocks lie before the path, which lies in the last
    one or two of them."""
    rng, count = np.random.default_rng(base), 33
    paths = [[0]]
    for node in range(1, count):
        parent = int(rng.integers(node // 2, node))
        paths.append([*paths[parent], node])
    slots = Slots(DType.BFLOAT16, [base + count], group=16, kv_heads=2, head_dim=128)
    positions = np.array([base + len(path) - 1 for path in paths])
    masks = np.array([sum(1 << node for node in path) for path in paths], np.uint64)
    tree = {"tree_masks": masks, "tree_base": np.full(count, base, np.int32)}
    places = np.arange(base, base + count, dtype=np.int32)
    rows = slots.rows(positions, np.zeros(count), locations=places, **tree)
    q, blocks = slots.queries(count), any_choice(rng, rows, 2, SMALL)
    device = SparseDevice(cuda, slots, SMALL, portable=portable)
    together = device.attend(q, rows, blocks)
    for node, path in enumerate(paths):
        at, to = base + np.array(path), np.arange(base, base + len(path))
        pages = {}
        for name in ("k_pages", "v_pages"):
            moved = getattr(slots, name).copy()
            tokens = moved[slots.tables[0, at // PAGE_SIZE], :, at % PAGE_SIZE]
            moved[slots.tables[0, to // PAGE_SIZE], :, to % PAGE_SIZE] = tokens
            pages[name] = cuda.array(moved, slots.dtype)
        held, device.pages = device.pages, device.pages | pages
        alone = device.attend(q[[node]], slots.rows(positions[[node]], [0]), blocks[[node]])
        device.pages = held
        assert np.array_equal(alone[0], together[node]), node
        by_itself = replace(
            rows, positions=positions[[node]].astype(np.int32), slots=rows.slots[[node]], locations=places[[node]],
            tree_masks=masks[[node]], tree_base=rows.tree_base[[node]],
        )  # fmt: skip
        assert np.array_equal(device.attend(q[[node]], by_itself, blocks[[node]])[0], together[node]), node
