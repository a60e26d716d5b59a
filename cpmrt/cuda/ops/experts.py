"""The mixture of experts on a GPU: routing, the products with the chosen experts' weights, and their sum.

Which experts are chosen is known on the device only, so every grid has room for any choice, and surplus blocks end at
once. In steps of at most 64 rows the products' kernels find the pairs of a row and an expert in the routing; the pairs
of a chunk are grouped by expert first, by a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from cpmrt.config.layers import ExpertsMlp
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.expert_plan import (
    WARPS,
    DownConstants,
    ExpertsRowConstants,
    GateUpRowConstants,
    ProductConstants,
    bytes_ahead,
    down_constants,
    experts_row_constants,
    fetched_bytes,
    most_tiles,
    product_constants,
    route_warps,
    row_constants,
    row_words,
)
from cpmrt.cuda.ops.linear_packed.layout import Weight, data_of
from cpmrt.cuda.ops.rows import BLOCK, VECTOR, RowConstants, rms_norm
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.layers import DOWN, EMBED, GATE_UP, HEAD
from cpmrt.ops import NOTHING, Handoff, Routing, Rows, check_shapes
from cpmrt.tensor_spec import BufferSpec, TensorSpec

_GROUP_THREADS = 1024
_SMALLEST_GROUP = 32
"""The fewest columns that may share a scale."""


@dataclass(frozen=True, slots=True)
class RouteConstants:
    """Compile-time constants of route.cu; `route_warps`: the warps that share a row."""

    hidden: int
    experts: int
    top: int
    route_warps: int


@dataclass(frozen=True, slots=True)
class GroupConstants:
    """Compile-time constants of group_pairs.cu."""

    experts: int


ROUTE = KernelSpec("route", "rows/route.cu", "route", RouteConstants, hot=True)
GROUP_PAIRS = KernelSpec("group_pairs", "experts/group_pairs.cu", "experts_gate_up", GroupConstants, hot=True)
EXPERTS_GATE_UP = KernelSpec("experts_gate_up", "experts/experts.cu", "experts_gate_up", ProductConstants, hot=True)
EXPERTS_GATE_UP_ROW = KernelSpec(
    "experts_gate_up_row", "experts/gate_up_row.cu", "experts_gate_up", GateUpRowConstants, hot=True
)
EXPERTS_ROW = KernelSpec(
    "experts_row", "experts/experts_row.cu", "experts_down", ExpertsRowConstants, hot=True,
    waits_across_blocks=lambda macros: True,
)  # fmt: skip
EXPERTS_PROJECT = KernelSpec("experts_project", "experts/experts.cu", "experts_down", ProductConstants, hot=True)
EXPERTS_DOWN = KernelSpec("experts_down", "experts/experts_down.cu", "experts_down", DownConstants, hot=True)
COMBINE = KernelSpec("combine", "rows/combine.cu", "experts_down", RowConstants, hot=True)


@dataclass(frozen=True, eq=False, slots=True)
class ExpertRows:
    """The normalised rows that go through the experts and, for a chunk, its pairs in the order of the experts."""

    normed: DeviceArray
    starts: DeviceArray | None = None
    order: DeviceArray | None = None


@dataclass(frozen=True, eq=False, slots=True)
class UnroutedRow:
    """One row whose routing is left to the kernel of its first products, with that kernel's operands for it."""

    router: DeviceArray
    slots: DeviceArray


@dataclass(frozen=True, eq=False, slots=True)
class HeldRow:
    """One row whose routing and first products are left to the kernel of its last ones, with their operands."""

    constants: ExpertsRowConstants
    row: UnroutedRow
    norm: DeviceArray
    gate_up: Weight
    eps: float


def expert_table(mlp: ExpertsMlp, hidden_size: int) -> BufferSpec:
    """Return the buffer, zero at first, that lives as long as the executor: words that blocks of EXPERTS_ROW share."""
    words = row_words(hidden_size, mlp.intermediate_size, mlp.experts_per_token)
    return BufferSpec("expert_words", (words,), EMBED, HEAD, np.uint64, zeroed=True)


def expert_workspace(
    specs: Sequence[TensorSpec], mlp: ExpertsMlp, hidden_size: int, max_rows: int
) -> Iterator[BufferSpec]:
    """Yield the buffers of a step of at most `max_rows` rows.

    Raises UnsupportedModelError for weights that the kernels do not take.
    """
    for spec in specs:
        if not spec.num_experts or spec.quant is None:
            continue
        if spec.quant.permuted:
            raise UnsupportedModelError(
                f"{spec.name}: the CUDA executor does not take 4-bit experts with act-order",
                fix="use a checkpoint with desc_act false, or executor='reference'",
            )  # fmt: skip
        if spec.quant.bits != 4 or spec.quant.group_size < _SMALLEST_GROUP or spec.quant.in_blocks:
            raise UnsupportedModelError(
                f"{spec.name}: experts in a form that the CUDA executor does not take",
                expected=f"16 bits, or 4 with groups of {_SMALLEST_GROUP} or more",
                actual=f"{spec.quant.bits} bits, groups of {spec.quant.group_size}", fix="use executor='reference'",
            )  # fmt: skip
    pairs = max_rows * mlp.experts_per_token
    yield BufferSpec("expert_starts", (mlp.num_experts + 1,), GATE_UP, DOWN, np.int32)
    yield BufferSpec("expert_order", (pairs,), GATE_UP, DOWN, np.int32)
    yield BufferSpec("expert_outputs", (pairs, hidden_size), DOWN, DOWN)


class ExpertOps:
    """The ops of `ops.protocol.Ops` that choose experts and multiply by their weights.

    `arrays` holds the buffers of `expert_workspace` and `normed` by name, and perhaps that of `expert_table`.
    """

    def __init__(self, device: Device, launcher: Launcher, arrays: Mapping[str, DeviceArray]):
        self._device, self._launch, self._arrays = device, launcher, arrays

    def route(
        self, routing: Routing, x: DeviceArray, norm: DeviceArray, router: DeviceArray, eps: float, rows: Rows
    ) -> Handoff:
        """Launch the op `route`, which leaves the normalised rows; of a step of one row it launches nothing.

        `experts_gate_up`, given what this returns, finds the routing of such a row and writes it.
        """
        sizes = check_shapes("route", experts=routing.experts, shares=routing.shares, x=x, norm=norm, router=router)
        if len(x) == 1 and not rows.is_prefill:
            return Handoff(UnroutedRow(router, rows.slots))
        normed = self._arrays["normed"][: len(x)]
        constants = RouteConstants(sizes["C"], sizes["E"], sizes["A"], route_warps(sizes["C"]))
        outputs = routing.experts, routing.shares, normed
        given = x, norm, router, rows.slots, np.float32(eps)
        block = 32 * constants.route_warps
        self._launch(ROUTE, constants, len(x), block, *outputs, *given, prefers_shared=not rows.is_prefill)
        return Handoff(ExpertRows(normed))

    def experts_gate_up(
        self, out: DeviceArray, x: DeviceArray, norm: DeviceArray, weight: Weight, eps: float, routing: Routing,
        after: Handoff = NOTHING, *, down: Weight | None = None, is_prefill: bool = False,
    ) -> Handoff:  # fmt: skip
        """Launch the op `experts_gate_up`; a chunk's pairs are grouped first, one row is routed by the same kernel.

        Given `down`, this may launch nothing for a single row, so that nothing is written to `out`. Then `experts_down`
        launches all of it and must get what this returns.
        """
        sizes = check_shapes(
            "experts_gate_up", out=out, x=x, norm=norm, weight=weight, experts=routing.experts, shares=routing.shares
        )
        inner = out.shape[1] // sizes["A"]
        num_experts = weight.shape[0] // (2 * inner)
        if isinstance(after.prepared, UnroutedRow):
            if down is not None and "expert_words" in self._arrays:
                one = experts_row_constants(weight, down, num_experts, sizes["A"], self._device)
                if one is not None:
                    return Handoff(HeldRow(one, after.prepared, norm, weight, eps))
            self._routed_row(out, x, norm, weight, eps, routing, after.prepared, inner, down)
            return NOTHING
        if isinstance(after.prepared, ExpertRows):
            normed = after.prepared.normed
        else:
            normed = self._arrays["normed"][: len(x)]
            rms_norm(self._launch, normed, x, norm, eps)
        rows = self._grouped(normed, routing, num_experts) if is_prefill else ExpertRows(normed)
        constants = product_constants(0, weight, len(x), is_chunk=is_prefill)
        self._product(EXPERTS_GATE_UP, constants, out, normed, weight, routing, rows, num_experts, inner // 8)
        return Handoff(rows)

    def experts_down(
        self, x: DeviceArray, inner: DeviceArray, weight: Weight, scale: float, routing: Routing,
        after: Handoff = NOTHING, *, ahead: Weight | None = None, is_prefill: bool = False,
    ) -> None:  # fmt: skip
        """Launch the op `experts_down`, for a single row together with the ops that it has held back."""
        sizes = check_shapes(
            "experts_down", x=x, inner=inner, weight=weight, experts=routing.experts, shares=routing.shares
        )
        (num_rows, hidden), top = x.shape, sizes["A"]
        num_experts, rows = weight.shape[0] // hidden, after.prepared
        factor = np.float32(scale)
        if isinstance(rows, HeldRow):
            self._held_row(x, weight, routing, rows, factor, ahead)
            return
        if not is_prefill:
            counts = map(np.int32, (num_rows, top, num_experts, hidden))
            plan = down_constants(weight, num_rows, top, self._device)
            self._launch(
                EXPERTS_DOWN, plan, hidden // 16, 32 * WARPS, x, inner, data_of(weight), routing.experts,
                routing.shares, *counts, factor, smem=plan.shared_bytes(num_rows * top), prefers_shared=True,
            )  # fmt: skip
            return
        if not isinstance(rows, ExpertRows):
            rows = self._grouped(x, routing, num_experts)
        outputs, constants = self._arrays["expert_outputs"], product_constants(1, weight, num_rows, is_chunk=True)
        self._product(EXPERTS_PROJECT, constants, outputs, inner, weight, routing, rows, num_experts, hidden // 16)
        grid, counts = -(-x.size // VECTOR // BLOCK), map(np.int32, (num_rows, top))
        given = x, outputs, routing.shares, routing.experts
        self._launch(COMBINE, RowConstants(hidden), grid, BLOCK, *given, *counts, factor)

    def _routed_row(
        self, out: DeviceArray, x: DeviceArray, norm: DeviceArray, weight: Weight, eps: float, routing: Routing,
        row: UnroutedRow, inner: int, down: Weight | None,
    ) -> None:  # fmt: skip
        (num_experts, _), top = row.router.shape, routing.experts.shape[1]
        constants = row_constants(weight, num_experts, top, self._device)
        outputs = out, routing.experts, routing.shares
        given = x, norm, row.router, data_of(weight), None if down is None else data_of(down), row.slots
        expert_bytes, ahead = (0, 0) if down is None else bytes_ahead(down, num_experts, top)
        sizes = np.int32(inner), np.int64(expert_bytes), np.int32(ahead)
        self._launch(
            EXPERTS_GATE_UP_ROW, constants, ceil(top * inner // 8 / constants.warps), 32 * constants.warps, *outputs,
            *given, *sizes, np.float32(eps), smem=constants.shared_bytes, prefers_shared=True,
        )  # fmt: skip

    def _held_row(
        self, x: DeviceArray, down: Weight, routing: Routing, held: HeldRow, factor: np.float32, ahead: Weight | None
    ) -> None:
        one = held.constants
        fetched = (None, np.int32(0)) if ahead is None else (data_of(ahead), np.int32(fetched_bytes(ahead)))
        outputs = x, routing.experts, routing.shares, self._arrays["expert_words"]
        given = held.norm, held.row.router, data_of(held.gate_up), data_of(down), *fetched, held.row.slots
        self._launch(
            EXPERTS_ROW, one, one.grid, 32 * one.warps, *outputs, *given, np.float32(held.eps), factor,
            smem=one.shared_bytes, prefers_shared=True,
        )  # fmt: skip

    def _grouped(self, normed: DeviceArray, routing: Routing, num_experts: int) -> ExpertRows:
        starts, order = self._arrays["expert_starts"], self._arrays["expert_order"]
        given = routing.experts, np.int32(routing.experts.size)
        self._launch(GROUP_PAIRS, GroupConstants(num_experts), 1, _GROUP_THREADS, starts, order, *given)
        return ExpertRows(normed, starts, order)

    def _product(
        self, kernel: KernelSpec, constants: ProductConstants, out: DeviceArray, x: DeviceArray, weight: Weight,
        routing: Routing, rows: ExpertRows, num_experts: int, num_tiles: int,
    ) -> None:  # fmt: skip
        (num_rows, top), columns = routing.experts.shape, num_tiles * (16 if constants.product else 8)
        grid = (
            most_tiles(num_rows, top, num_experts, constants.tokens),
            ceil(num_tiles / (constants.warps * constants.warp_tiles)),
        )
        sizes = map(np.int32, (num_rows * top, top, num_experts, columns))
        given = x, data_of(weight), routing.experts, rows.starts, rows.order
        self._launch(
            kernel, constants, grid, 32 * constants.warps, out, *given, *sizes, smem=constants.shared_bytes,
            prefers_shared=not constants.chunk,
        )  # fmt: skip
