"""The products gate_up and down of one row in one launch, for rows where starting and ending kernels takes most of the
time.

The launch leaves the sums of down over its runs, which the launch of the next layer's attention adds to the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import ResidualRest, StepProduct
from cpmrt.cuda.ops.linear_packed.constants import LinearPackedConstants
from cpmrt.cuda.ops.linear_packed.held_layers import HeldProduct
from cpmrt.cuda.ops.linear_packed.layout import RUNS, PackedLayout, PackedWeight, whole_lines
from cpmrt.cuda.ops.linear_packed.plan import plan_columns

_CAPABILITY, _BITS = 90, 4
_CLUSTER = 16
"""Blocks of a cluster, which makes the columns of a run of down."""
# The largest share of a multiprocessor's shared memory for a block: there are more clusters than find room with a
# multiprocessor for each block, and blocks of the attention beside them.
_MOST_SHARE = 0.48


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnRowConstants(LinearPackedConstants):
    """Compile-time constants of ffn_row.cu: those of the product gate_up, and the columns of down."""

    inner_features: int


FFN_ROW = KernelSpec(
    "ffn_row", "linear_packed/ffn_row.cu", "gate_up", FfnRowConstants, hot=True, arch="sm_90",
    has_wide_clusters=lambda sizes: True,
)  # fmt: skip


@dataclass(frozen=True)
class FfnRowPlan:
    """One launch of `FFN_ROW` with `grid` blocks, which leaves `num_sums` sums in float32."""

    constants: FfnRowConstants
    grid: int
    shared_bytes: int
    num_sums: int

    @classmethod
    def of(cls, gate_up: PackedLayout, down: PackedLayout, device: Device) -> FfnRowPlan | None:
        """Plan for weights of these layouts; None where they stay two launches."""
        grid, width, inner = RUNS * _CLUSTER, down.out_features, down.in_features
        finds_room = device.capability == _CAPABILITY and device.has_wide_clusters and device.num_sms >= grid
        streamed = gate_up.bits, gate_up.scale_group, gate_up.zeros, gate_up.runs
        are_alike = streamed == (down.bits, down.scale_group, down.zeros, down.runs) and gate_up.bits == _BITS
        is_mlp = gate_up.in_features == width and gate_up.out_features == 2 * inner
        tiles, rest = divmod(down.num_tiles, _CLUSTER)
        if not finds_room or not are_alike or not is_mlp or rest or down.num_slices % RUNS:
            return None
        product = plan_columns(gate_up, grid, device)
        if product is None or tiles * 32 > product.block:
            return None
        smem_bytes = whole_lines(product.shared_bytes)
        constants = product.constants.extended(FfnRowConstants, smem_bytes=smem_bytes, inner_features=inner)
        shared_bytes = constants.smem_bytes + tiles * down.run_bytes
        fits = shared_bytes <= device.shared_bytes_per_block * _MOST_SHARE
        return cls(constants, grid, shared_bytes, RUNS * width) if fits else None


_plan = lru_cache(maxsize=64)(FfnRowPlan.of)


def num_sums(layouts: Sequence[PackedLayout], device: Device) -> int:
    """Return how many sums the mlps of a model with weights of these layouts leave at most; 0 where none is planned."""
    gate_ups, downs = ({layout for layout in layouts if layout.product == kind} for kind in ("gate_up", "residual"))
    plans = (_plan(gate_up, down, device) for gate_up in gate_ups for down in downs)
    return max((plan.num_sums for plan in plans if plan is not None), default=0)


class HeldFfn:
    """Holds the mlp of one row back until the launch that adds its `sums` to the row.

    Anything else that is launched before gets it as two launches, or gate_up alone.
    """

    def __init__(self, launcher: Launcher, device: Device, sums: DeviceArray | None):
        self._launch, self._device, self._sums = launcher, device, sums
        self._held: list[HeldProduct] = []

    def takes(self, product: StepProduct, weight: PackedWeight, launch_one: Callable[[], object]) -> bool:
        """Hold gate_up of one row, or the product after it if one launch can do both; return whether it does."""
        if self._sums is None or len(product.x) != 1 or weight.perm is not None:
            return False
        if product.kind == "gate_up":
            self._launch.release()
        elif not self._completes(product, weight):
            return False
        self._held.append(HeldProduct(product, weight, launch_one))
        self._launch.hold(self._release)
        return True

    def _completes(self, product: StepProduct, weight: PackedWeight) -> bool:
        """Whether the product is the down product of the gate_up product that is held, in a launch that is planned."""
        if len(self._held) != 1 or product.kind != "residual":
            return False
        (gate_up,), (x,) = self._held, product.outputs
        is_linked = gate_up.product.outputs[0] is product.x and gate_up.product.x is x and product.bias is None
        return is_linked and _plan(gate_up.weight.layout, weight.layout, self._device) is not None

    def launch_sums(self, x: DeviceArray) -> tuple[DeviceArray | None, np.float32]:
        """Launch what is held, if it is to be added to `x`; return the sums and what they are multiplied by.

        None where nothing has to be added any more.
        """
        if len(self._held) != 2 or self._held[1].product.outputs[0] is not x:
            return None, np.float32(0)
        (gate_up, down), self._held = self._held, []
        plan, rest = _plan(gate_up.weight.layout, down.weight.layout, self._device), down.product.rest
        assert plan is not None and isinstance(rest, ResidualRest)
        self._launch(
            FFN_ROW, gate_up.product.built(plan.constants), plan.grid, plan.constants.warps * 32,
            self._sums, x, gate_up.product.norm, gate_up.weight.data, down.weight.data, np.float32(gate_up.product.eps),
            smem=plan.shared_bytes, prefers_shared=True,
        )  # fmt: skip
        return self._sums, rest.scale

    def _release(self) -> None:
        held, self._held = self._held, []
        for op in held:
            op.launch_one()
