"""Operands and oracle of the experts' kernels: weights in 16 bits, or packed in 4, and any routing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from linear_cases import layout_of
from packed_oracle import pack
from reference.operands import EPS, make_rows

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.expert_plan import ExpertsRowConstants, experts_row_constants, row_words
from cpmrt.cuda.ops.experts import ExpertOps
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.ops import NOTHING, Routing, Rows
from cpmrt.reference.ops import NumpyOps
from cpmrt.tensor_spec import Product

SCALE = 0.37
DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD_ROWS = 3


@dataclass(frozen=True)
class Shape:
    """Sizes of a mixture of experts and the format of its weights.

    `group` is the number of columns that share a scale, 0 for weights in 16 bits. With `zeros` each group has a zero
    point.
    """

    hidden: int
    inner: int
    experts: int
    top: int
    group: int = 0
    zeros: bool = False


@dataclass
class Case:
    """A mixture of experts with input rows: float32 arrays whose values are those that the device holds."""

    shape: Shape
    dtype: DType
    num_rows: int
    held: dict[str, Any] = field(default_factory=dict)
    """Codes, scales and zero points of a packed weight, by its name."""

    def __post_init__(self) -> None:
        shape, self.random = self.shape, np.random.default_rng(0)
        self.x = self.normal(self.num_rows, shape.hidden, spread=0.25)
        self.norm = round_to(1 + 0.2 * self.random.standard_normal(shape.hidden, np.float32), self.dtype)
        self.router = self.normal(shape.experts, shape.hidden, spread=shape.hidden**-0.5)
        self.gate_up = self.weight("gate_up", 2 * shape.experts * shape.inner, shape.hidden)
        self.down = self.weight("residual", shape.experts * shape.hidden, shape.inner)
        self.ops = NumpyOps(self.dtype)

    def normal(self, *shape: int, spread: float = 1.0) -> Any:
        return round_to(self.random.standard_normal(shape, np.float32) * np.float32(spread), self.dtype)

    def weight(self, product: str, rows: int, columns: int) -> Any:
        group = self.shape.group
        if not group:
            return self.normal(rows, columns, spread=columns**-0.5)
        codes = self.random.integers(0, 16, (rows, columns), np.uint8)
        spread = 0.2 * columns**-0.5
        scales = round_to(spread * (0.5 + self.random.random((rows, columns // group), np.float32)), self.dtype)
        zeros = self.random.integers(0, 16, scales.shape).astype(np.float32) if self.shape.zeros else None
        self.held[product] = codes, scales, zeros
        centred = codes.reshape(rows, -1, group) - (8.0 if zeros is None else zeros[:, :, None])
        dense: Any = (centred.astype(np.float32) * scales[:, :, None]).reshape(rows, columns)
        return dense

    def routing(self, kind: str) -> Routing:
        """Return the experts of every row.

        `kind` "router" chooses by the scores, "one" gives all rows the same experts, "padded" makes some rows padding.
        """
        routing = no_routing(self.num_rows, self.shape.top)
        slots = np.zeros(self.num_rows, np.int32)
        if kind == "padded":
            slots[1::3] = -1
        rows = make_rows(np.arange(self.num_rows), slots, np.zeros((1, 1), np.int32))
        self.ops.route(routing, self.x, self.norm, self.router, EPS, rows)
        if kind == "one":
            routing.experts[:] = np.arange(self.shape.top) + self.shape.experts - self.shape.top
        return routing

    def inner(self, routing: Routing, is_prefill: bool) -> Any:
        """Return the rows that the NumPy op experts_gate_up gives: the input of the second product."""
        inner = np.zeros((self.num_rows, self.shape.top * self.shape.inner), np.float32)
        self.ops.experts_gate_up(inner, self.x, self.norm, self.gate_up, EPS, routing, is_prefill=is_prefill)
        return inner


def no_routing(num_rows: int, top: int) -> Routing:
    return Routing(np.full((num_rows, top), -9, np.int32), np.full((num_rows, top), np.nan, np.float32))


class OnDevice:
    """The operands on the device, the buffers of the ops, and outputs among poison."""

    def __init__(self, cuda: Any, case: Case, device: Device | None = None):
        self.cuda, self.case, self.device = cuda, case, device or cuda.device
        shape, dtype = case.shape, case.dtype
        self.norm, self.router = cuda.array(case.norm, dtype), cuda.array(case.router, dtype)
        self.gate_up = self._weight("gate_up", case.gate_up)
        self.down = self._weight("residual", case.down)
        pairs = case.num_rows * shape.top
        poison = np.full((pairs, shape.hidden), np.nan, np.float32)
        self.arrays = {
            "normed": cuda.array(poison[: case.num_rows], dtype),
            "expert_starts": cuda.array(np.full(shape.experts + 1, -7, np.int32)),
            "expert_order": cuda.array(np.full(pairs, -7, np.int32)),
            "expert_outputs": cuda.array(poison, dtype),
            "expert_words": cuda.array(np.zeros(row_words(shape.hidden, shape.inner, shape.top), np.uint64)),
        }

    def _weight(self, product: Product, dense: Any) -> Any:
        case, cuda = self.case, self.cuda
        if not case.shape.group:
            return cuda.array(dense, case.dtype)
        layout = layout_of(product, dense.shape, case.shape.group, cuda.device, zeros=case.shape.zeros)
        codes, scales, zeros = case.held[product]
        repeats = max(case.shape.group // layout.scale_group, 1)

        def words(array: Any) -> Any:
            return None if array is None else from_float32(np.repeat(array, repeats, 1), case.dtype)

        return PackedWeight(cuda.array(pack(layout, codes, words(scales), words(zeros))), None, layout)

    def ops(self, *, pdl: bool = False, in_one: bool = False) -> ExpertOps:
        """Return the ops; with `in_one` they have the buffer that one launch for all ops of a single row needs."""
        arrays = {name: array for name, array in self.arrays.items() if in_one or name != "expert_words"}
        return ExpertOps(self.device, self.cuda.launcher(self.case.dtype, pdl=pdl), arrays)

    def run(
        self, routing: Routing, rows: Any = None, *, is_prefill: bool = False, pdl: bool = False, together: bool = True
    ) -> tuple[Any, Any]:
        """Run both ops on some rows of the case; return the inner rows [T, A F] and the residual stream.

        Guards around both must stay poison. `together` False does not tell the second op what the first one prepared.
        """
        case, cuda, dtype = self.case, self.cuda, self.case.dtype
        rows = np.arange(case.num_rows) if rows is None else np.asarray(rows)
        count, guard = len(rows), GUARD_ROWS
        inner = cuda.array(np.full((count + 2 * guard, case.shape.top * case.shape.inner), np.nan, np.float32), dtype)
        stream = np.full((count + 2 * guard, case.shape.hidden), np.nan, np.float32)
        stream[guard : guard + count] = case.x[rows]
        x, held = cuda.array(stream, dtype), slice(guard, guard + count)
        given = Routing(cuda.array(routing.experts[rows]), cuda.array(routing.shares[rows]))
        ops = self.ops(pdl=pdl)
        after = ops.experts_gate_up(inner[held], x[held], self.norm, self.gate_up, EPS, given, is_prefill=is_prefill)
        after = after if together else NOTHING
        ops.experts_down(x[held], inner[held], self.down, SCALE, given, after, is_prefill=is_prefill)
        found = []
        for array in (inner, x):
            values = cuda.numpy(array, dtype)
            assert np.isnan(values[:guard]).all() and np.isnan(values[guard + count :]).all(), "wrote outside"
            found.append(values[held])
        return found[0], found[1]

    @property
    def row_constants(self) -> ExpertsRowConstants | None:
        """The compile-time constants of experts_row.cu for these weights, or None if the kernel does not take them."""
        shape = self.case.shape
        return experts_row_constants(self.gate_up, self.down, shape.experts, shape.top, self.device)

    def layer(
        self, rows: Any, slots: Any = None, *, pdl: bool = False, in_one: bool = False
    ) -> tuple[Routing, Any, Any]:
        """Run the layer's ops in order on some rows of the case; return the routing, inner rows and residual stream.

        With `in_one` a single row takes one launch, where there is a kernel for that. Entries of the routing and of
        the inner rows that no kernel has written are -9 or NaN.
        """
        case, cuda, dtype = self.case, self.cuda, self.case.dtype
        count, empty = len(rows), no_routing(len(rows), case.shape.top)
        routing = Routing(cuda.array(empty.experts), cuda.array(empty.shares))
        inner = cuda.array(np.full((count, case.shape.top * case.shape.inner), np.nan, np.float32), dtype)
        x, held = cuda.array(case.x[rows], dtype), np.zeros(count, np.int32) if slots is None else slots
        ops, step = self.ops(pdl=pdl, in_one=in_one), Rows(None, None, cuda.array(held), None, is_prefill=False)
        after = ops.route(routing, x, self.norm, self.router, EPS, step)
        after = ops.experts_gate_up(inner, x, self.norm, self.gate_up, EPS, routing, after, down=self.down)
        ops.experts_down(x, inner, self.down, SCALE, routing, after)
        found = Routing(cuda.numpy(routing.experts), cuda.numpy(routing.shares))
        return found, cuda.numpy(inner, dtype), cuda.numpy(x, dtype)
