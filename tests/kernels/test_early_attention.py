"""The product of q, k and v that starts attention before its own wait gives the bits of the one that does so behind it,
and attention reads nothing before it is there."""

from __future__ import annotations

from typing import Any

import pytest
from linear_cases import EPS, H200
from row_layer_cases import DTYPES, POSITIONS, OneRow, Shape, Step, assert_same, behind_slow_writer

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.ops.linear_packed.plan import plan_packed
from cpmrt.dtypes import DType
from cpmrt.ops import KVPages, QkvWeights

SHAPES = {
    "5-2B": Shape(GroupedAttention(16, 2, 128), 2048),
    "groups of 32 with zero points": Shape(GroupedAttention(16, 2, 128), 2048, 32, 1),
    "heads of 64": Shape(GroupedAttention(12, 4, 64), 2048),
}


def launch(step: Step, *, starts_attention: bool, times: int = 1) -> list[Any]:
    """Launch the ops qkv and decode_attention so many times, and return the words of the output and of all pages."""
    row, kv = step.row, KVPages(step.k, step.v)
    weights, scale = QkvWeights(row.held["norm"], row.weight), row.shape.heads.head_dim**-0.5
    operands = step.q, kv, step.x, weights, row.held["rope"], step.rows, EPS
    for _ in range(times):
        left = step.products.qkv(*operands, is_attended=starts_attention)
        step.attention.decode_attention(step.out, step.q, kv, step.rows, scale, after=left)
    return step.words()


@pytest.mark.parametrize("name", SHAPES)
def test_these_products_start_attention(name: str) -> None:
    assert plan_packed(SHAPES[name].layout(H200), 1, H200, starts_next=True).constants.trigger == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_are_the_same(cuda: Any, name: str, dtype: DType) -> None:
    row = OneRow(cuda, SHAPES[name], dtype)
    for position in POSITIONS[:-2]:
        expected = launch(Step(row, position, position % 3), starts_attention=False)
        for times in (1, 12):
            step = Step(row, position, position % 3, pdl=True)
            assert_same(launch(step, starts_attention=True, times=times), expected, position)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("position", [0, 64, 1087, 2047])
def test_nothing_is_read_before_the_kernel_before_has_written_it(cuda: Any, name: str, position: int) -> None:
    row = OneRow(cuda, SHAPES[name], DType.BFLOAT16)
    expected = launch(Step(row, position, 0), starts_attention=False)
    for _ in range(3):
        assert_same(launch(behind_slow_writer(row, position), starts_attention=True), expected, position)


@pytest.mark.gpu
def test_padding_stores_nothing(cuda: Any) -> None:
    row = OneRow(cuda, SHAPES["5-2B"], DType.BFLOAT16)
    for position, slot in ((10**9, -1), (-1, -1)):
        step = Step(row, position, slot)
        before = step.words()
        out, *pages = launch(step, starts_attention=True)
        assert not out.any()
        assert_same([out, *pages], [out, *before[1:]], slot)
