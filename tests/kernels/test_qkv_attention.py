"""qkv_attention and linear_qkv_attention: they give the bits of the two or three ops that they join; the rows that they
take; the data that they read early."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from attention_cases import plan_of, workspace
from linear_cases import EPS, H200, ORIN, bits, layout_of, normals
from packed_oracle import pack
from slow_writer import SlowWriter

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.ops.attention import qkv
from cpmrt.cuda.ops.attention.attention import AttentionOps
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.ops.attention.qkv import HeldQkv, HeldRowAttention, QkvAttentionPlan
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.cuda.ops.products import Products
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.ops import ANY_ROWS, OPS, SHORT_KEYS, Handoff, KVPages, QkvWeights, RowKind, Rows
from cpmrt.reference.ops import NumpyOps

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
POSITIONS = [0, 1, 62, 63, 64, 127, 128, 200, 511, 512, 1023, 1024, 1087, 1088, 1535, 1536, 1983, 2047, 2048, 2111]
FAR = [4095, 4096, 5000, 8191]
NUM_SLOTS = 3


@dataclass(frozen=True)
class Shape:
    """A layer's attention heads, and the columns and group size of its qkv weight; group size 0 means a 16-bit
    weight."""

    heads: GroupedAttention
    columns: int
    group_size: int = 128
    zeros: int = 0

    @property
    def size(self) -> tuple[int, int]:
        return self.heads.q_size + 2 * self.heads.kv_size, self.columns

    def layout(self, device: Any) -> Any:
        if not self.group_size:
            return None
        return layout_of("qkv", self.size, self.group_size, device, zeros=self.zeros, head_dim=self.heads.head_dim)

    def output_layout(self, device: Any) -> Any:
        """Return the layout of the output's weight."""
        return layout_of("residual", (self.columns, self.heads.q_size), self.group_size, device, zeros=self.zeros)


SHAPES = {
    "0.5B": Shape(GroupedAttention(16, 2, 64), 1024),
    "demo": Shape(GroupedAttention(8, 2, 64), 256),
    "blocks with fewer tiles": Shape(GroupedAttention(6, 2, 64), 512),
    "a query head for each of three": Shape(GroupedAttention(3, 3, 64), 768, 64),
    "one KV head, an odd number of slices": Shape(GroupedAttention(8, 1, 64), 640),
    "groups of 32": Shape(GroupedAttention(16, 2, 64), 1024, 32),
    "zero points": Shape(GroupedAttention(8, 2, 64), 384, 128, 1),
    "0.5B in 16 bits": Shape(GroupedAttention(16, 2, 64), 1024, 0),
    "blocks with fewer tiles in 16 bits": Shape(GroupedAttention(6, 2, 64), 512, 0),
}
PROJECTED = {
    "0.5B": SHAPES["0.5B"],
    "groups of 32": SHAPES["groups of 32"],
    "zero points, few query heads": Shape(GroupedAttention(8, 2, 64), 512, 128, 1),
    "one KV head, runs without columns": Shape(GroupedAttention(8, 1, 64), 512),
}
"""Layers whose attention is multiplied with the output's weight in the same launch."""


class OneRow:
    """A layer's weights and pages, for one row of any position and slot; pages are NaN where no token has been stored
    yet."""

    def __init__(self, cuda: Any, shape: Shape, dtype: DType, max_context: int = 2176):
        self.cuda, self.shape, self.dtype, self.max_context = cuda, shape, dtype, max_context
        heads, (rows, columns) = shape.heads, shape.size
        rng = np.random.default_rng(rows + columns)
        normal = normals(rng, dtype)
        self.weight, self.values = self.weights(rng, cuda, shape.size, shape.layout(cuda.device))
        self.output = None
        if shape in PROJECTED.values():
            size = columns, heads.q_size
            self.output, _ = self.weights(rng, cuda, size, shape.output_layout(cuda.device))
        self.x, self.norm = normal(1, columns, spread=1.7), 1 + normal(columns, spread=0.25)
        angles = rng.random((max_context, heads.head_dim // 2), np.float32) * np.float32(6.28)
        self.rope = np.stack([np.cos(angles), np.sin(angles)])
        pages_each = pages_for(max_context)
        self.table = rng.permutation(NUM_SLOTS * pages_each).astype(np.int32).reshape(NUM_SLOTS, pages_each)
        self.pages = normal(2, self.table.size, heads.num_kv_heads, PAGE_SIZE, heads.head_dim)
        self.plan = plan_of(heads, cuda.device, max_context)
        self.arrays = workspace(cuda, self.plan) | {"normed": None, "qkv": cuda.array(np.zeros((1, rows), np.uint16))}
        on_device = {"x": self.x, "norm": self.norm}
        self.held = {name: cuda.array(values, dtype) for name, values in on_device.items()}
        self.held |= {"rope": cuda.array(self.rope), "table": cuda.array(self.table)}

    def weights(self, rng: Any, cuda: Any, size: tuple[int, int], layout: Any) -> tuple[Any, Any]:
        """Return a weight of this size on the device, and its values in float32."""
        shape, dtype, (rows, columns) = self.shape, self.dtype, size
        if layout is None:
            values = normals(rng, dtype)(rows, columns, spread=columns**-0.5)
            return cuda.array(values, dtype), values
        groups = columns // shape.group_size
        codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
        scales = round_to((0.5 + rng.random((rows, groups), np.float32)) * np.float32(0.2 * columns**-0.5), dtype)
        zeros = rng.integers(0, 17, (rows, groups)).astype(np.float32) if shape.zeros else None
        words = (None if part is None else from_float32(part, dtype) for part in (scales, zeros))
        weight = PackedWeight(cuda.array(pack(layout, codes, *words)), None, layout)
        middle = np.float32(8) if zeros is None else np.repeat(zeros, shape.group_size, axis=1)
        return weight, (codes - middle) * np.repeat(scales, shape.group_size, axis=1)

    def pages_before(self, position: int, slot: int) -> Any:
        """Return the slot's keys and values of the tokens before the row; the row's own and later ones are NaN."""
        pages, used = self.pages.copy(), max(position, 0)
        if slot >= 0:
            pages[:, self.table[slot, used // PAGE_SIZE], :, used % PAGE_SIZE :] = np.nan
            pages[:, self.table[slot, used // PAGE_SIZE + 1 :]] = np.nan
        return pages

    def run(self, position: int, slot: int, *, is_attended: bool, pdl: bool = False, launches: int = 1) -> list[Any]:
        """Run the row's two ops and return the words of its output and of all keys and values."""
        step = Step(self, position, slot, pdl=pdl)
        for _ in range(launches):
            step.launch(is_attended=is_attended)
        return step.words()

    def project(self, position: int, slot: int, *, joined: bool, pdl: bool = False, launches: int = 1) -> list[Any]:
        """Run the row's three ops, in one launch or in three, and return the words of x and of all keys and values."""
        step = Step(self, position, slot, pdl=pdl)
        for _ in range(launches):
            step.project(joined=joined)
        return [bits(self.cuda.numpy(step.x)), *step.words()[1:]]


class Step:
    """The qkv and attention ops of a row, on their own arrays `k`, `v`, `x`, `q` and `out`."""

    def __init__(self, row: OneRow, position: int, slot: int, *, pdl: bool = False):
        self.row, cuda, dtype = row, row.cuda, row.dtype
        self.k, self.v = (cuda.array(values, dtype) for values in row.pages_before(position, slot))
        self.x = row.held["x"].copy()
        self.q, self.out = (cuda.array(np.full((1, row.shape.heads.q_size), np.nan, np.float32), dtype) for _ in "qo")
        places = (cuda.array(np.array([value], np.int32)) for value in (position, slot))
        self.rows = Rows(None, *places, row.held["table"], False, kind=RowKind("short"))
        launcher = cuda.launcher(dtype, pdl=pdl)
        self.products = Products(cuda.device, launcher, None, row.arrays, row.plan.decode)  # type: ignore[arg-type]
        self.attention = AttentionOps(launcher, row.plan, row.arrays)
        self.writer: SlowWriter | None = None  # its kernel reads its arrays while the ops are launched

    def launch(self, *, is_attended: bool) -> Handoff:
        row, kv = self.row, KVPages(self.k, self.v)
        weights = QkvWeights(row.held["norm"], row.weight)
        left = self.products.qkv(self.q, kv, self.x, weights, row.held["rope"], self.rows, EPS, is_attended=is_attended)
        assert isinstance(left.prepared, HeldQkv) == is_attended
        self.attention.decode_attention(self.out, self.q, kv, self.rows, row.shape.heads.head_dim**-0.5, after=left)
        return left

    def project(self, *, joined: bool, output_scale: float = 0.21) -> None:
        """Launch the ops qkv, decode_attention and project_residual."""
        row, kv = self.row, KVPages(self.k, self.v)
        weights, scale = QkvWeights(row.held["norm"], row.weight), row.shape.heads.head_dim**-0.5
        left = self.products.qkv(self.q, kv, self.x, weights, row.held["rope"], self.rows, EPS, is_attended=joined)
        left = self.attention.decode_attention(self.out, self.q, kv, self.rows, scale, after=left, is_projected=joined)
        assert isinstance(left.prepared, HeldRowAttention) == joined
        self.products.project_residual(self.x, self.out, row.output, None, output_scale, left)

    def words(self) -> list[Any]:
        assert not self.row.cuda.numpy(self.row.arrays["attention_arrivals"]).any(), "counters were not reset"
        return [bits(self.row.cuda.numpy(array)) for array in (self.out, self.k, self.v)]


def behind_slow_writer(row: OneRow, position: int) -> Step:
    """Return the ops of a row whose x is NaN until a kernel that is under way writes it."""
    step, cuda = Step(row, position, 0, pdl=True), row.cuda
    stale = cuda.array(np.full(row.x.shape, np.nan, np.float32), row.dtype)
    step.writer = SlowWriter(cuda, [step.x], [stale], [row.held["x"]])
    step.writer.launch()
    return step


def assert_same(actual: list[Any], expected: list[Any], what: object) -> None:
    for name, words, wanted in zip(("out or x", "k", "v"), actual, expected, strict=True):
        assert np.array_equal(words, wanted), f"{name} of {what}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_are_those_of_two_launches(cuda: Any, name: str, dtype: DType) -> None:
    row = OneRow(cuda, SHAPES[name], dtype)
    for position in POSITIONS:
        one, two = (row.run(position, position % NUM_SLOTS, is_attended=held) for held in (True, False))
        assert_same(one, two, position)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["0.5B", "demo", "0.5B in 16 bits"])
def test_long_rows(cuda: Any, name: str) -> None:
    row = OneRow(cuda, SHAPES[name], DType.BFLOAT16, max_context=8192)
    for position in (5, *POSITIONS[-6:], *FAR):
        one, two = (row.run(position, 1, is_attended=held) for held in (True, False))
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
        once = row.run(position, 2, is_attended=False)
        assert_same(row.run(position, 2, is_attended=True, pdl=True, launches=20), once, position)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["0.5B", "0.5B in 16 bits"])
@pytest.mark.parametrize("position", [0, 64, 1087, 2047])
def test_x_is_read_once_the_kernel_before_has_written_it(cuda: Any, name: str, position: int) -> None:
    row = OneRow(cuda, SHAPES[name], DType.BFLOAT16)
    expected = row.run(position, 0, is_attended=False)
    for _ in range(3):
        step = behind_slow_writer(row, position)
        step.launch(is_attended=True)
        assert_same(step.words(), expected, position)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", PROJECTED)
def test_with_the_output_the_bits_are_those_of_three_launches(cuda: Any, name: str, dtype: DType) -> None:
    row = OneRow(cuda, PROJECTED[name], dtype)
    for position in (position for position in POSITIONS if position < SHORT_KEYS):
        one, three = (row.project(position, position % NUM_SLOTS, joined=joined) for joined in (True, False))
        assert_same(one, three, position)


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
