"""A layer of a small model with random weights, and the ops of one of its rows: in few launches, or one for each op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from attention_cases import plan_of, workspace
from linear_cases import EPS, bits, layout_of, normals
from packed_oracle import pack
from slow_writer import SlowWriter

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.ops.attention.attention import AttentionOps
from cpmrt.cuda.ops.attention.qkv import HeldQkv, HeldRowAttention
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.cuda.ops.products import Products
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.ops import NOTHING, Handoff, KVPages, QkvWeights, RowKind, Rows
from cpmrt.tensor_spec import Product

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
POSITIONS = [0, 1, 62, 63, 64, 127, 128, 200, 511, 512, 1023, 1024, 1087, 1088, 1535, 1536, 1983, 2047, 2048, 2111]
FAR = [4095, 4096, 5000, 8191]
NUM_SLOTS = 3


@dataclass(frozen=True)
class Shape:
    """A layer's attention heads, the columns and group size of its qkv weight, and the columns of its mlp.

    Group size 0 means a 16-bit weight. A layer without `inner` columns has no mlp.
    """

    heads: GroupedAttention
    columns: int
    group_size: int = 128
    zeros: int = 0
    inner: int = 0

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

    def mlp_layouts(self, device: Any) -> tuple[Any, Any]:
        """Return the layouts of gate_up and down."""
        sizes: tuple[tuple[Product, tuple[int, int]], ...]
        sizes = ("gate_up", (2 * self.inner, self.columns)), ("residual", (self.columns, self.inner))
        gate_up, down = (layout_of(kind, size, self.group_size, device, zeros=self.zeros) for kind, size in sizes)
        return gate_up, down


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
    "0.5B": replace(SHAPES["0.5B"], inner=4096),
    "groups of 32": replace(SHAPES["groups of 32"], inner=3072),
    "zero points, few query heads": Shape(GroupedAttention(8, 2, 64), 512, 128, 1, inner=2048),
    "one KV head, runs without columns": Shape(GroupedAttention(8, 1, 64), 512, inner=1024),
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
            layouts = shape.mlp_layouts(cuda.device)
            sizes = (2 * shape.inner, columns), (columns, shape.inner)
            self.mlp = [self.weights(rng, cuda, *given)[0] for given in zip(sizes, layouts, strict=True)]
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
        self.arrays["packed_sums"] = cuda.array(np.full(8 * columns, np.nan, np.float32))

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

    def run(self, position: int, slot: int, *, joined: bool, pdl: bool = False, launches: int = 1) -> list[Any]:
        """Run the row's two ops, in one launch or in two.

        Returns the words of its output and of all keys and values.
        """
        step = Step(self, position, slot, pdl=pdl)
        for _ in range(launches):
            step.launch(is_attended=joined)
        return step.words()

    def project(self, position: int, slot: int, *, joined: bool, pdl: bool = False, launches: int = 1) -> list[Any]:
        """Run the row's three ops, in one launch or in three, and return the words of x and of all keys and values."""
        step = Step(self, position, slot, pdl=pdl)
        for _ in range(launches):
            step.project(joined=joined)
        return [bits(self.cuda.numpy(step.x)), *step.words()[1:]]

    def layers(self, position: int, slot: int, *, joined: bool, pdl: bool = False, launches: int = 2) -> list[Any]:
        """Run so many equal layers and the attention of one more, in two launches each or in one for each op.

        Returns the words of x and of all keys and values.
        """
        step = Step(self, position, slot, pdl=pdl)
        for _ in range(launches):
            step.run_mlp(step.project(joined=joined))
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
        self.inner = cuda.array(np.full((1, max(row.shape.inner, 1)), np.nan, np.float32), dtype)
        self.rows = Rows(None, *places, row.held["table"], False, kind=RowKind("short"))
        launcher = cuda.launcher(dtype, pdl=pdl)
        self.products = Products(cuda.device, launcher, None, row.arrays, row.plan.decode)  # type: ignore[arg-type]
        self.attention, self.release = AttentionOps(launcher, row.plan, row.arrays), launcher.release
        self.writer: SlowWriter | None = None  # its kernel reads its arrays while the ops are launched

    def launch(self, *, is_attended: bool) -> Handoff:
        row, kv = self.row, KVPages(self.k, self.v)
        weights = QkvWeights(row.held["norm"], row.weight)
        left = self.products.qkv(self.q, kv, self.x, weights, row.held["rope"], self.rows, EPS, is_attended=is_attended)
        assert isinstance(left.prepared, HeldQkv) == is_attended
        self.attention.decode_attention(self.out, self.q, kv, self.rows, row.shape.heads.head_dim**-0.5, after=left)
        return left

    def project(self, *, joined: bool, output_scale: float = 0.21) -> Handoff:
        """Launch the ops qkv, decode_attention and project_residual."""
        row, kv = self.row, KVPages(self.k, self.v)
        weights, scale = QkvWeights(row.held["norm"], row.weight), row.shape.heads.head_dim**-0.5
        left = self.products.qkv(self.q, kv, self.x, weights, row.held["rope"], self.rows, EPS, is_attended=joined)
        left = self.attention.decode_attention(self.out, self.q, kv, self.rows, scale, after=left, is_projected=joined)
        assert isinstance(left.prepared, HeldRowAttention) == joined
        return self.products.project_residual(self.x, self.out, row.output, None, output_scale, left)

    def run_mlp(self, after: Handoff = NOTHING, scale: float = 0.19) -> None:
        """Launch or hold the ops gate_up and project_residual of the mlp."""
        gate_up, down = self.row.mlp
        left = self.products.gate_up(self.inner, self.x, self.row.held["norm"], gate_up, EPS, after)
        self.products.project_residual(self.x, self.inner, down, None, scale, left)

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


def assert_joining_keeps_bits(run: Callable[..., list[Any]], positions: Iterable[int]) -> None:
    """Compare what `run(position, slot, joined=...)` returns with joined launches and with one for each op."""
    for position in positions:
        joined, apart = (run(position, position % NUM_SLOTS, joined=joined) for joined in (True, False))
        assert_same(joined, apart, position)


def assert_same(actual: list[Any], expected: list[Any], what: object) -> None:
    for name, words, wanted in zip(("out or x", "k", "v"), actual, expected, strict=True):
        assert np.array_equal(words, wanted), f"{name} of {what}"
