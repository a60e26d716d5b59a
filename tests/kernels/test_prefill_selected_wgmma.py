"""prefill_selected_wgmma against the NumPy op: rows of a chunk attend to the blocks that each chose, neighbouring rows
together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from sparse_cases import SMALL, Slots, SparseDevice, any_choice, expected_attention

from cpmrt.config import SparseConfig
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.ops.attention.prefill import PrefillPlan
from cpmrt.cuda.ops.attention.selected import plan_tiles
from cpmrt.cuda.precompile import known_device
from cpmrt.dtypes import DType
from cpmrt.ops import OPS, Rows

SHAPES = [
    (DType.BFLOAT16, 16, 2, 128), (DType.FLOAT16, 16, 1, 64), (DType.BFLOAT16, 32, 1, 64), (DType.FLOAT16, 32, 1, 128),
    (DType.BFLOAT16, 16, 1, 96), (DType.FLOAT16, 16, 2, 96),
]  # fmt: skip
LONG = SparseConfig()
"""Rows choose 96 blocks; they are dense up to 8191 tokens."""


@pytest.fixture
def hopper(cuda: Any) -> Any:
    if cuda.arch != "sm_90":
        pytest.skip("wgmma is an instruction of sm_90 alone")
    return cuda


def device_of(cuda: Any, slots: Slots, sparse: SparseConfig, *, pdl: bool = False, sms: int = 4) -> SparseDevice:
    """Return a device planned for `sms` multiprocessors: with few of them a tile joins many neighbouring rows even of a
    short chunk; with many it has one neighbour or none."""
    return SparseDevice(cuda, slots, sparse, max_rows=512, fewest_tiled=1, pdl=pdl, sms=sms)


def chunk(slots: Slots, start: int, count: int, padding: int = 0) -> Rows:
    """Return rows of a chunk in the last slot, and `padding` rows behind them."""
    slot = len(slots.lengths) - 1
    places = [*range(start, start + count), *[0] * padding], [slot] * count + [-1] * padding
    return slots.rows(*places, is_prefill=True)


def assert_close(actual: Any, wanted: Any, dtype: DType) -> None:
    assert np.isfinite(actual).all()
    errors = np.linalg.norm(actual - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert errors.max() <= OPS["prefill_attention"].tolerance[dtype], f"row {errors.argmax()}: {errors.max():.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
@pytest.mark.parametrize(
    ("start", "count"), [(0, 400), (192, 70), (255, 66), (300, 150), (320, 64), (319, 1), (10, 80), (511, 2)]
)
def test_chunks_match_the_numpy_op(
    hopper: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, start: int, count: int
) -> None:
    """Chunks match the op before, across and behind the switch from dense attention and borders of blocks, whatever the
    tiles; the bucket's rows past the chunk are not stored."""
    slots = Slots(dtype, [64, start + count], group=group, kv_heads=kv_heads, head_dim=head_dim)
    rows = chunk(slots, start, count, padding=7)
    q, blocks = slots.queries(count + 7), any_choice(slots.rng, rows, kv_heads, SMALL)
    out = device_of(hopper, slots, SMALL).attend(q, rows, blocks)
    assert_close(out[:count], expected_attention(slots, q, rows, blocks, SMALL)[:count], dtype)
    assert np.isnan(out[count:]).all(), "stored rows past the chunk"
    apart = device_of(hopper, slots, SMALL, sms=132).attend(q, rows, blocks)
    assert np.array_equal(apart[:count], out[:count]), "other tiles"


@pytest.mark.gpu
@pytest.mark.parametrize(("start", "count"), [(200, 150), (256, 40), (0, 256)])
def test_rows_that_look_at_everything_are_left_to_dense_attention(hopper: Any, start: int, count: int) -> None:
    slots = Slots(DType.BFLOAT16, [start + count], head_dim=128)
    rows = chunk(slots, start, count)
    q, blocks = slots.queries(count), any_choice(slots.rng, rows, 2, SMALL)
    out = device_of(hopper, slots, SMALL).attend_chosen(q, rows, blocks)
    assert np.array_equal(np.isnan(out).all(axis=1), rows.positions < SMALL.dense_context)
    assert np.array_equal(np.isnan(out).any(axis=1), rows.positions < SMALL.dense_context)


@pytest.mark.gpu
@pytest.mark.parametrize("slot", [-1, 0])
def test_without_a_row_that_chooses_nothing_is_stored(hopper: Any, slot: int) -> None:
    slots = Slots(DType.BFLOAT16, [300], head_dim=128)
    rows = slots.rows(range(70), [slot] * 70, is_prefill=True)
    blocks = any_choice(slots.rng, rows, 2, SMALL)
    assert np.isnan(device_of(hopper, slots, SMALL).attend_chosen(slots.queries(70), rows, blocks)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(DType.BFLOAT16, 128), (DType.FLOAT16, 64)], ids=str)
@pytest.mark.parametrize("shared", [0.0, 0.9, 1.0])
def test_a_long_context(hopper: Any, dtype: DType, head_dim: int, shared: float) -> None:
    """Rows that choose few of many blocks match the op; a share `shared` of the rows has the choice of the row before.
    The context ends inside a block."""
    start, count = 33_000, 41
    slots = Slots(dtype, [start + count], group=16, kv_heads=1, head_dim=head_dim)
    rows = chunk(slots, start, count)
    q, blocks = slots.queries(count), any_choice(slots.rng, rows, 1, LONG)
    same_block = rows.positions // 64 == np.roll(rows.positions // 64, 1)
    for row in np.flatnonzero(same_block & (slots.rng.random(count) < shared)):
        blocks[row] = blocks[row - 1]
    out = device_of(hopper, slots, LONG).attend(q, rows, blocks)
    assert_close(out, expected_attention(slots, q, rows, blocks, LONG), slots.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=str)
@pytest.mark.parametrize("spread", [5.0, 300.0])
def test_large_scores_do_not_overflow(hopper: Any, dtype: DType, spread: float) -> None:
    """Large scores do not overflow, whether they surpass a row's maximum by little, so that it stays, or by much."""
    slots = Slots(dtype, [500], group=16, kv_heads=1, head_dim=128)
    rows = chunk(slots, 300, 200)
    q, blocks = slots.queries(200, spread=spread), any_choice(slots.rng, rows, 1, SMALL)
    out = device_of(hopper, slots, SMALL).attend(q, rows, blocks)
    assert_close(out, expected_attention(slots, q, rows, blocks, SMALL), slots.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(DType.BFLOAT16, 128), (DType.FLOAT16, 64)], ids=str)
def test_a_row_has_the_same_bits_whatever_its_neighbours_are_and_choose(
    hopper: Any, dtype: DType, head_dim: int
) -> None:
    """A row keeps its bits when the odd rows choose other blocks, when the chunk begins elsewhere, and with dependent
    launches."""
    slots = Slots(dtype, [900], group=16, kv_heads=2, head_dim=head_dim)
    rows, q = chunk(slots, 500, 400), slots.queries(400)
    blocks = any_choice(slots.rng, rows, 2, SMALL)
    device = device_of(hopper, slots, SMALL)
    out = device.attend(q, rows, blocks)
    others = any_choice(slots.rng, rows, 2, SMALL)
    mixed = np.where(np.arange(400)[:, None, None] % 2, others, blocks)
    changed = device.attend(q, rows, mixed)
    assert np.array_equal(changed[::2], out[::2]) and not np.array_equal(changed[1::2], out[1::2])
    for first in (1, 3, 13, 21):
        part = replace(rows, positions=rows.positions[first:], slots=rows.slots[first:])
        assert np.array_equal(device.attend(q[first:], part, blocks[first:]), out[first:]), first
    assert np.array_equal(device_of(hopper, slots, SMALL, pdl=True).attend(q, rows, blocks), out)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_together(
    hopper: Any, dtype: DType, group: int, kv_heads: int, head_dim: int
) -> None:
    """A row has the same bits where the neighbours of its tile share next to no blocks, so that warps multiply alone,
    all blocks, or a part of them."""
    start, count = 33_024, 24
    slots = Slots(dtype, [start + count], group=group, kv_heads=kv_heads, head_dim=head_dim)
    rows, q = chunk(slots, start, count), slots.queries(count)
    device = device_of(hopper, slots, LONG, sms=2 * group // 16)
    apart = any_choice(slots.rng, rows, kv_heads, LONG)
    alike = np.broadcast_to(apart[:1], apart.shape)
    some = np.where(np.arange(count)[:, None, None] % 3 == 0, apart[:1], apart)
    results = [device.attend(q, rows, np.ascontiguousarray(blocks)) for blocks in (apart, alike, some)]
    assert_close(results[0], expected_attention(slots, q, rows, apart, LONG), dtype)
    assert np.array_equal(results[1][0], results[0][0]) and np.array_equal(results[2][0], results[0][0])
    assert not np.array_equal(results[1][1], results[0][1])
    ours = np.arange(count) % 3 == 0
    assert np.array_equal(results[2][ours], results[1][ours]) and np.array_equal(results[2][~ours], results[0][~ours])


def plan_of(
    group: int, head_dim: int = 128, *, topk: int = 64, max_context: int = 524_288, arch: int = 90, num_sms: int = 132
) -> PrefillPlan | None:
    heads = GroupedAttention(2 * group, 2, head_dim, sparse=replace(LONG, topk=topk))
    return plan_tiles(heads, known_device(f"sm_{arch}", num_sms), max_context)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("group", "rows"), [(16, 12), (32, 12), (8, None), (24, None), (1, None)])
def test_the_plan_says_who_takes_a_shape(group: int, head_dim: int, rows: int | None) -> None:
    plan = partial(plan_of, group, head_dim)
    taken = plan()
    assert (taken and taken.rows_per_tile) == rows
    assert taken is None or taken.shared_bytes <= 232_448
    assert plan(topk=8192) is None, "the lists are too long"
    assert plan(max_context=1 << 24) is None, "the ring has no room for a word a block"
    assert [plan(arch=arch) for arch in (80, 89, 100, 120)] == [None] * 4


@pytest.mark.parametrize(("group", "num_sms"), [(16, 132), (32, 132), (16, 78), (48, 5), (16, 1)])
def test_tiles_hold_the_rows_and_keep_the_device_busy(group: int, num_sms: int) -> None:
    plan = plan_of(group, num_sms=num_sms)
    assert plan is not None
    for rows in (1, 12, 13, 500, 2048, 4096):
        _, tiles = plan.grid(rows)
        blocks, needed = tiles * plan.blocks_per_tile, -(-rows // plan.rows_per_tile) * plan.blocks_per_tile
        assert needed <= blocks < needed + max(num_sms, plan.blocks_per_tile), rows
        assert num_sms % plan.blocks_per_tile or blocks % num_sms == 0, rows
