"""score_chunk.cu, the scores of a prefill chunk's blocks on sm_90, tested by the blocks that are chosen: oracle, ties,
the same choice whatever the other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sparse_cases import SMALL, Slots, SparseDevice, check_choices

from cpmrt.config import SparseConfig
from cpmrt.dtypes import DType
from cpmrt.memory.caches import PAGE_SIZE

pytestmark = pytest.mark.gpu

SHAPES = [(DType.BFLOAT16, 2, 128), (DType.FLOAT16, 1, 96), (DType.BFLOAT16, 3, 64), (DType.FLOAT16, 2, 128)]


@pytest.fixture(autouse=True)
def needs_hopper(cuda: Any) -> None:
    if cuda.arch.rstrip("a") != "sm_90":
        pytest.skip("score_chunk is for sm_90")


def chunk_device(cuda: Any, slots: Slots, sparse: SparseConfig, **settings: Any) -> SparseDevice:
    return SparseDevice(cuda, slots, sparse, max_rows=512, **settings)


@pytest.mark.parametrize(("dtype", "kv_heads", "head_dim"), SHAPES, ids=str)
@pytest.mark.parametrize(
    "sparse", [SMALL, SparseConfig(2, 128, 6, 300), SparseConfig(20, 64, 22, 0), SparseConfig(0, 64, 4, -1)], ids=str
)
def test_rows_at_every_offset_within_a_block(
    cuda: Any, dtype: DType, kv_heads: int, head_dim: int, sparse: SparseConfig
) -> None:
    """Rows at every offset within a page choose as the oracle. Thread blocks have rows that choose and rows that do
    not; padding never chooses."""
    slots = Slots(dtype, [2100], kv_heads=kv_heads, head_dim=head_dim)
    device = chunk_device(cuda, slots, sparse)
    positions = np.concatenate([np.arange(150, 320, 7), np.arange(577, 641), np.arange(1400, 2100, 33)])
    count = len(positions)
    rows = slots.rows([*positions, *[0] * 21], [0] * count + [-1] * 21, is_prefill=True)
    q = slots.queries(count + 21, 2.0)
    assert check_choices(slots, q, rows, device.select(q, rows), sparse) >= 19


def test_equal_scores_take_the_lower_blocks(cuda: Any) -> None:
    slots, sparse = Slots(DType.BFLOAT16, [4096], kv_heads=1), SparseConfig(2, 128, 6, -1)
    keys = np.tile(np.arange(64) % 3, (4096, 1, 1)).astype(np.float32)
    slots.set_tokens(0, keys, keys)
    slots.compress([4096])
    positions = [768, 831, 1000, 4095]
    rows = slots.rows(positions, np.zeros(4), is_prefill=True)
    blocks = chunk_device(cuda, slots, sparse).select(slots.queries(4), rows)
    owns = [position // PAGE_SIZE for position in positions]
    assert blocks.tolist() == [[[0, 1, 2, 3, 4, own - 2, own - 1, own]] for own in owns]


def test_planted_ties(cuda: Any) -> None:
    """Ties are broken as by the oracle: small integers make every product exact, so that equal windows score exactly
    alike."""
    rng = np.random.default_rng(3)
    for trial in range(20):
        length = 64 * int(rng.integers(12, 80)) - int(rng.integers(0, 64))
        slots = Slots(DType.FLOAT16, [length], kv_heads=1)
        levels = np.repeat(rng.integers(0, 3, 80), 64)[:length]
        keys = np.tile(levels[:, None, None], (1, 1, 64)).astype(np.float32) / 16
        slots.set_tokens(0, keys, keys)
        slots.compress([length])
        sparse = SparseConfig(trial % 2, 64, int(rng.integers(2, 6)), -1)
        q = np.tile(rng.choice([-1.0, 0.0, 1.0], (40, 1)), (1, 16 * 64)).astype(np.float32)
        rows = slots.rows(np.arange(length - 40, length), np.zeros(40), is_prefill=True)
        blocks = chunk_device(cuda, slots, sparse).select(q, rows)
        assert np.array_equal(blocks, slots.select(q, rows, sparse)), trial


def test_scores_that_overflow_and_vanish(cuda: Any) -> None:
    slots = Slots(DType.BFLOAT16, [2048])
    device = chunk_device(cuda, slots, SMALL)
    for spread in (30.0, 300.0, 3000.0):
        rows = slots.rows(np.arange(2040, 2048), np.zeros(8), is_prefill=True)
        blocks = device.select(slots.queries(8, spread), rows)
        for lists in blocks.reshape(-1, SMALL.num_selected):
            assert (np.diff(lists) > 0).all() and lists[0] == 0 and lists[-2:].tolist() == [30, 31]


def test_a_choice_is_the_same_bits_in_any_company(cuda: Any) -> None:
    """A row's choice depends neither on the grid that divides the scores, nor on passes, nor on the other rows and
    their number."""
    slots = Slots(DType.BFLOAT16, [6000], head_dim=128)
    positions = np.arange(5900, 6000)
    rows, q = slots.rows(positions, np.zeros(100), is_prefill=True), slots.queries(100, 3.0)
    whole = chunk_device(cuda, slots, SMALL).select(q, rows)
    assert check_choices(slots, q, rows, whole, SMALL) == 100
    for settings in ({"sms": 1}, {"sms": 5000, "pdl": True}, {"rows_per_pass": 16}, {"rows_per_pass": 37, "pdl": True}):
        assert np.array_equal(chunk_device(cuda, slots, SMALL, **settings).select(q, rows), whole), settings
    device = chunk_device(cuda, slots, SMALL)
    for first, size in ((0, 1), (3, 5), (17, 16), (40, 60)):
        part = slice(first, first + size)
        few = replace(rows, positions=rows.positions[part], slots=rows.slots[part])
        assert np.array_equal(device.select(q[part], few), whole[part]), (first, size)


def test_long_contexts(cuda: Any) -> None:
    """Rows of contexts up to 320K tokens choose as the oracle; there are compressed keys only, no tokens."""
    slots = Slots(DType.BFLOAT16, [64])
    num_pages = 5000
    slots.tables = slots.rng.permutation(num_pages).astype(np.int32)[None]
    slots.k1, slots.k2 = slots.normal(num_pages, 2, 4, 64), slots.normal(num_pages, 2, 64)
    slots.k_pages = np.zeros((num_pages, 2, 64, 64), np.float32)
    slots.v_pages = slots.k_pages
    sparse = SparseConfig()
    positions = np.array([131071, 131072, 200000, num_pages * 64 - 1])
    rows, q = slots.rows(positions, np.zeros(4), is_prefill=True), slots.queries(4, 2.0)
    for settings in ({}, {"sms": 2}):
        blocks = chunk_device(cuda, slots, sparse, **settings).select(q, rows)
        assert check_choices(slots, q, rows, blocks, sparse) == 4
