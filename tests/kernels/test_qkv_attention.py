"""qkv_attention and linear_qkv_attention: they give the bits of the two or three ops that they join; the rows that they
take; the data that they read early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from linear_cases import EPS, H200, ORIN, bits, layout_of
from row_layer_cases import (
    DTYPES,
    FAR,
    POSITIONS,
    PROJECTED,
    SHAPES,
    OneRow,
    Shape,
    Step,
    assert_joining_keeps_bits,
    assert_same,
    behind_slow_writer,
)

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.ops.attention import qkv
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.ops.attention.qkv import HeldQkv, QkvAttentionPlan
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.dtypes import DType
from cpmrt.ops import ANY_ROWS, OPS, SHORT_KEYS, KVPages, QkvWeights, RowKind, Rows
from cpmrt.reference.ops import NumpyOps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_are_those_of_two_launches(cuda: Any, name: str, dtype: DType) -> None:
    assert_joining_keeps_bits(OneRow(cuda, SHAPES[name], dtype).run, POSITIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["0.5B", "demo", "0.5B in 16 bits"])
def test_long_rows(cuda: Any, name: str) -> None:
    row = OneRow(cuda, SHAPES[name], DType.BFLOAT16, max_context=8192)
    for position in (5, *POSITIONS[-6:], *FAR):
        one, two = (row.run(position, 1, joined=held) for held in (True, False))
        assert_same(one, two, position)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["0.5B", "zero points", "0.5B in 16 bits"])
def test_against_the_ops(cuda: Any, name: str, dtype: DType) -> None:
    row = OneRow(cuda, SHAPES[name], dtype)
    for position, slot in ((0, 0), (700, 2), (1087, 1)):
        pages = row.pages_before(position, slot)
        rows = Rows(None, *(np.array([value], np.int32) for value in (position, slot)), row.table, False)
        q, out = np.empty((2, 1, row.shape.heads.q_size), np.float32)
        ops, kv, scale = NumpyOps(dtype), KVPages(*pages), row.shape.heads.head_dim**-0.5
        ops.qkv(q, kv, row.x, QkvWeights(row.norm, row.values), row.rope, rows, EPS)
        ops.decode_attention(out, q, kv, rows, scale)
        step = Step(row, position, slot)
        step.launch(is_attended=True)
        actual = cuda.numpy(step.out, dtype)
        assert np.linalg.norm(actual - out) / np.linalg.norm(out) < OPS["decode_attention"].tolerance[dtype], position


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["0.5B", "0.5B in 16 bits"])
def test_padding_becomes_zeros_and_stores_nothing(cuda: Any, name: str) -> None:
    row = OneRow(cuda, SHAPES[name], DType.BFLOAT16)
    for position, slot in ((10**9, -1), (-1, 1), (-1, -1)):
        step = Step(row, position, slot)
        before = step.words()
        step.launch(is_attended=True)
        out, *pages = step.words()
        assert not out.any()
        assert_same([out, *pages], [out, *before[1:]], slot)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["0.5B", "0.5B in 16 bits"])
@pytest.mark.parametrize("max_context", [2176, 8192])
def test_dependent_launches_give_the_same_bits(cuda: Any, name: str, max_context: int) -> None:
    row = OneRow(cuda, SHAPES[name], DType.BFLOAT16, max_context)
    for position in (0, 63, 64, 1087, max_context - 1):
        once = row.run(position, 2, joined=False)
        assert_same(row.run(position, 2, joined=True, pdl=True, launches=20), once, position)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["0.5B", "0.5B in 16 bits"])
@pytest.mark.parametrize("position", [0, 64, 1087, 2047])
def test_x_is_read_once_the_kernel_before_has_written_it(cuda: Any, name: str, position: int) -> None:
    row = OneRow(cuda, SHAPES[name], DType.BFLOAT16)
    expected = row.run(position, 0, joined=False)
    for _ in range(3):
        step = behind_slow_writer(row, position)
        step.launch(is_attended=True)
        assert_same(step.words(), expected, position)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", PROJECTED)
def test_with_the_output_the_bits_are_those_of_three_launches(cuda: Any, name: str, dtype: DType) -> None:
    short = (position for position in POSITIONS if position < SHORT_KEYS)
    assert_joining_keeps_bits(OneRow(cuda, PROJECTED[name], dtype).project, short)


@pytest.mark.gpu
def test_with_the_output_a_long_row_comes_out_right(cuda: Any) -> None:
    """Its attention is cut otherwise than in three launches, so last bits differ. What is added outweighs x."""
    row = OneRow(cuda, PROJECTED["0.5B"], DType.BFLOAT16, max_context=8192)
    for position in (2048, *FAR):
        added = []
        for joined in (True, False):
            step = Step(row, position, 1)
            step.project(joined=joined, output_scale=1e6)
            added.append(cuda.numpy(step.x, row.dtype) - row.x)
        assert np.linalg.norm(added[1]) > 10 * np.linalg.norm(row.x), position
        assert np.linalg.norm(added[0] - added[1]) < 0.01 * np.linalg.norm(added[1]), position


@pytest.mark.gpu
def test_with_the_output_padding_changes_nothing(cuda: Any) -> None:
    row = OneRow(cuda, PROJECTED["0.5B"], DType.BFLOAT16)
    for position, slot in ((10**9, -1), (-1, 1), (-1, -1)):
        step = Step(row, position, slot)
        before = [bits(cuda.numpy(step.x)), *step.words()[1:]]
        assert_same(row.project(position, slot, joined=True), before, slot)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROJECTED)
def test_with_the_output_dependent_launches_give_the_same_bits(cuda: Any, name: str) -> None:
    """Each launch reads the x that the one before has changed."""
    row = OneRow(cuda, PROJECTED[name], DType.BFLOAT16)
    for position in (0, 63, 64, 1087, 2047):
        expected = row.project(position, 2, joined=False, launches=12)
        assert_same(row.project(position, 2, joined=True, pdl=True, launches=12), expected, position)


@pytest.mark.gpu
@pytest.mark.parametrize("position", [0, 64, 1087, 2047])
def test_with_the_output_x_is_read_once_the_kernel_before_has_written_it(cuda: Any, position: int) -> None:
    row = OneRow(cuda, PROJECTED["0.5B"], DType.BFLOAT16)
    expected = row.project(position, 0, joined=False)
    for _ in range(3):
        step = behind_slow_writer(row, position)
        step.project(joined=True)
        assert_same([bits(cuda.numpy(step.x)), *step.words()[1:]], expected, position)


def decode_plan(shape: Shape, device: Any, **options: Any) -> DecodePlan:
    return DecodePlan.of(shape.heads, device, 4096, **options)


def test_which_layers_take_one_launch() -> None:
    def is_planned(shape: Shape, device: Any = H200, **options: Any) -> bool:
        return (
            QkvAttentionPlan.of(shape.size, shape.layout(device), decode_plan(shape, device, **options), device)
            is not None
        )

    assert all(is_planned(shape) for shape in SHAPES.values())
    small = SHAPES["0.5B"]
    assert not is_planned(small, is_fp8=True)
    assert not is_planned(small, ORIN) and not is_planned(small, replace(H200, capability=86, whole_clusters=0))
    large = GroupedAttention(32, 2, 128), 4096
    for heads, columns in (large, (GroupedAttention(16, 2, 128), 2048), (GroupedAttention(24, 8, 64), 1536)):
        assert not is_planned(Shape(heads, columns)) and not is_planned(Shape(heads, columns, 0)), heads
    assert not is_planned(Shape(GroupedAttention(8, 2, 64), 256, 0)), "fewer than eight runs"


def test_which_layers_take_their_output_into_the_launch() -> None:
    def plan(shape: Shape, output: Any = None, device: Any = H200) -> QkvAttentionPlan | None:
        held = QkvAttentionPlan.of(shape.size, shape.layout(device), decode_plan(shape, device), device)
        assert held is not None
        return held.projecting(output or shape.output_layout(device), device)

    for name, shape in PROJECTED.items():
        assert plan(shape) is not None, name
    small = PROJECTED["0.5B"]
    constants = plan(small).constants  # type: ignore[union-attr]
    assert (constants.output_rounds, constants.kv_heads) == (4, 2)  # type: ignore[union-attr]
    assert plan(small, device=replace(H200, has_wide_clusters=False)) is None
    assert plan(small, layout_of("residual", (1024, 1024), 64, H200)) is None, "other groups"
    assert plan(small, layout_of("residual", (1536, 1024), 128, H200)) is None, "more tiles than places"
    for name in ("demo", "a query head for each of three", "blocks with fewer tiles in 16 bits"):
        shape = SHAPES[name]
        output = layout_of("residual", (shape.columns, shape.columns), shape.group_size or 128, H200)
        assert plan(shape, output) is None, name


def test_only_plain_rows_are_held() -> None:
    shape = SHAPES["demo"]
    weight = PackedWeight(np.zeros(0), None, shape.layout(H200))  # type: ignore[arg-type]
    x, one, pages = np.zeros((1, 256)), np.zeros(1, np.int32), np.zeros((4, 2, 64, 64))
    rows = Rows(None, one, one, np.zeros((1, 4)), False, kind=RowKind("short"))
    kv, weights = KVPages(pages, pages), QkvWeights(one, weight)

    def held(rows: Rows = rows, weights: QkvWeights = weights, x: Any = x, rope: Any = one) -> HeldQkv | None:
        return qkv.hold_qkv(decode_plan(shape, H200), H200, kv, x, weights, rope, rows, EPS)

    assert held() is not None
    for given in (
        {"rows": replace(rows, kind=ANY_ROWS)},
        {"rows": replace(rows, tree_masks=one)}, {"rows": replace(rows, locations=one)},
        {"rows": replace(rows, reach=one)}, {"weights": replace(weights, bias=one)},
        {"weights": replace(weights, norm=None)}, {"weights": replace(weights, q_norm=one)},
        {"weights": replace(weights, weight=np.zeros((768, 256)))}, {"x": np.zeros((2, 256))}, {"rope": None},
        {"x": np.zeros((1, 264))},
        {"weights": replace(weights, weight=replace(weight, perm=one))},
    ):  # fmt: skip
        assert held(**given) is None, given  # type: ignore[arg-type]
