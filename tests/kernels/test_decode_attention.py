"""decode_attention against the NumPy op: lengths around pages, groups, head sizes, bitwise row invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import AttentionDevice, assert_close, make_case, oracle

from cpmrt.dtypes import DType
from cpmrt.ops import RowKind

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 300, 1000, 2048, 2049, 5000]
LENGTHS_ALONE = [1, 63, 64, 65, 1000, 2047, 2048, 2049, 5000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (2, 2), (4, 1), (5, 1), (8, 2), (16, 2), (17, 1), (20, 2)])
def test_matches_the_numpy_op(cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int) -> None:
    case = make_case(dtype, group, kv_heads, head_dim, LENGTHS)
    assert_close(AttentionDevice(cuda, case).run(case), oracle(case), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (5, 96), (1, 64), (20, 128)])
def test_without_clusters(cuda: Any, dtype: DType, group: int, head_dim: int) -> None:
    case = make_case(dtype, group, 2, head_dim, LENGTHS)
    assert_close(AttentionDevice(cuda, case, portable=True).run(case), oracle(case), dtype)


@pytest.mark.parametrize("sms", [8, 40, 264])
def test_any_number_of_splits(cuda: Any, sms: int) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [1, 700, 20000])
    assert_close(AttentionDevice(cuda, case, max_context=32768, sms=sms).run(case), oracle(case), case.dtype)


@pytest.mark.parametrize("portable", [False, True])
def test_a_row_does_not_depend_on_the_others(cuda: Any, portable: bool) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [*LENGTHS, 3000, 7168])
    launcher = AttentionDevice(cuda, case, portable=portable)
    alone = np.concatenate([launcher.run(case.row(i)) for i in range(len(case.q))])
    for num_rows in (2, 5, 8, 12, 16, 31, 32, 64):
        rows = [(7 * i + num_rows) % len(case.q) for i in range(num_rows)]
        for kind in (RowKind("short"), RowKind("long")):
            found = launcher.run(case.take(rows), pdl=num_rows % 2 == 0, kind=kind)
            assert np.array_equal(found, alone[rows]), (num_rows, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "kv_heads", "head_dim"), [(16, 2, 128), (8, 2, 64), (5, 1, 96), (20, 2, 128)])
def test_a_short_row_alone_has_the_bits_of_one_of_any_length(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int
) -> None:
    """A row alone gets the same bits from the launch for short rows as from the one for any length, also if it has more
    keys than that launch is meant for, which one cluster takes in turns."""
    case = make_case(dtype, group, kv_heads, head_dim, LENGTHS_ALONE)
    launcher = AttentionDevice(cuda, case)
    assert launcher.plan.has_short_launch(1) == (launcher.plan.decode.cluster > 1)
    unknown = np.concatenate([launcher.run(case.row(i)) for i in range(len(case.q))])
    assert_close(unknown, oracle(case), dtype)
    for options in ({}, {"pdl": True, "launches": 20}):
        found = [launcher.run(case.row(i), kind=RowKind("short"), **options) for i in range(len(case.q))]
        assert np.array_equal(np.concatenate(found), unknown), options


def test_one_row_where_no_text_becomes_long_has_the_same_bits(cuda: Any) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, LENGTHS_ALONE[:-2])
    few, more = (AttentionDevice(cuda, case, max_context=context) for context in (2048, 8192))
    assert not few.plan.has_short_launch(1)
    for row in map(case.row, range(len(case.q))):
        assert np.array_equal(few.run(row), more.run(row))


def test_repeated_and_dependent_launches_give_the_same_bits(cuda: Any) -> None:
    case = make_case(DType.FLOAT16, 8, 2, 64, LENGTHS)
    launcher = AttentionDevice(cuda, case)
    once = launcher.run(case)
    assert np.array_equal(launcher.run(case, launches=20), once)
    assert np.array_equal(launcher.run(case, launches=20, pdl=True), once)


def test_padding_rows_become_zeros(cuda: Any) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [100, 5000, 64, 1])
    launcher, expected = AttentionDevice(cuda, case), oracle(case)
    case.slots[1], case.positions[1], case.slots[3] = -1, 10**9, -1
    out = launcher.run(case)
    assert not out[[1, 3]].any()
    assert_close(out[[0, 2]], expected[[0, 2]], case.dtype)


def test_slots_may_share_pages(cuda: Any) -> None:
    case = make_case(DType.BFLOAT16, 4, 2, 96, [1000, 1000, 900])
    case.block_tables[1:, :10] = case.block_tables[0, :10]
    assert_close(AttentionDevice(cuda, case).run(case), oracle(case), case.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(cuda: Any, dtype: DType) -> None:
    case = make_case(dtype, 16, 2, 128, [3, 64, 1000, 5000], spread=300.0)
    assert_close(AttentionDevice(cuda, case).run(case), oracle(case), dtype)


def test_a_row_that_sees_nothing_becomes_zeros(cuda: Any) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [64])
    case.positions[:] = -1
    assert not AttentionDevice(cuda, case).run(case).any()
