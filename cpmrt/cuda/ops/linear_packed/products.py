"""Products with packed weights: few rows in one kernel, a chunk with the weight dequantised slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.load.repack import DEQUANTIZE, OWN_FORMAT, repack_constants
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear import OPS, DeviceLimits
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout
from cpmrt.cuda.ops.linear_packed.memory import slice_rows
from cpmrt.cuda.ops.linear_packed.plan import PREPARE_THREADS, LinearW4Plan, packed_layout, plan_linear_w4
from cpmrt.ops import Handoff, QuantizedWeight

_CONSTANTS = (
    *("LINEAR", "IN_FEATURES", "WEIGHT_BITS", "RUNS", "SCALE_GROUP", "ZEROS", "ROWS", "WARPS", "WARPGROUPS"),
    *("SHARED_RUN", "NORM", "PREPARED", "STAGE_SLICES", "STAGES", "EARLY_SLOTS", "CLUSTERS", "RECEIVED_APART", "FEEDS"),
    *("TRIGGER", "KEPT_ROUNDS", "SMEM_BYTES", "PORTABLE"),
)


def _exchange_through_memory(sizes: Mapping[str, int]) -> bool:
    """Whether blocks that share tiles wait for each other's sums, and are not of one cluster."""
    return bool(sizes["SHARED_RUN"] and sizes["RUNS"] > 1 and not sizes["CLUSTERS"])


LINEAR_W4 = {
    product: KernelSpec(
        f"linear_packed_{product}", "linear_packed/linear_packed.cu", op,
        (*_CONSTANTS, "HEAD_DIM") if product == "qkv" else _CONSTANTS, hot=True,
        waits_across_blocks=_exchange_through_memory,
    )
    for product, op in OPS.items()
}
PREPARE = KernelSpec(
    "prepare_rows", "linear_packed/prepare_rows.cu", "gate_up",
    ("IN_FEATURES", "ROWS", "SCALE_GROUP", "ZEROS", "WARPGROUPS"), hot=True,
)  # fmt: skip
GATHER = KernelSpec("gather_columns", "linear_packed/gather.cu", "project_residual", hot=True)
_plan = lru_cache(maxsize=1024)(plan_linear_w4)
_BLOCK = 256
_WIDTH = 8
"""Elements that a thread of the gathering kernel moves."""


class QuantizedProducts:
    """For one device and model. `scratch` holds the buffers of `weights_w4` by name."""

    def __init__(
        self,
        config: ModelConfig,
        launcher: Launcher,
        gemm: Gemm,
        scratch: Mapping[str, Any],
        limits: DeviceLimits,
        *,
        portable: bool,
    ):
        self._config, self._launch, self._gemm, self._scratch = config, launcher, gemm, scratch
        self._limits, self._portable = limits, portable

    def skinny(
        self,
        product: str,
        weight: QuantizedWeight,
        source: Any,
        norm: Any | None,
        eps: float,
        args: tuple[Any, ...],
        after: Handoff,
    ) -> Handoff:
        """A product of 1 to 64 rows, fused as with a weight in 16 bits, whose kernel takes `args`.

        First of them is the output. Among them are `source`, the rows (normalised with `norm` where there is one), and
        `weight`. `after`: what the op that made `source` has left; prepared rows are the constants of `w4_fed`.
        """
        plan, is_fed = self._planned(product, weight, source, after.prepared, has_norm=norm is not None)
        rows = self._scratch["w4_fed" if is_fed else "w4_rows"] if plan.prepared else source
        if plan.prepared and not is_fed:
            self._launch(
                PREPARE, plan.prepare_constants, len(source), PREPARE_THREADS,
                rows, source, norm, weight.perm, np.float32(eps),
            )  # fmt: skip
        partials = self._scratch["w4_partials"] if plan.partial_bytes else None
        arrivals = self._scratch["w4_arrivals"] if plan.num_arrivals else None
        given: list[Any] = []
        for arg in args:
            given += [weight.codes, partials, arrivals] if arg is weight else [rows if arg is source else arg]
        if product == "gate_up":
            given.insert(1, None if plan.fed_constants is None else self._scratch["w4_fed"])
        self._launch(
            LINEAR_W4[product], plan.constants, plan.grid, plan.block, *given,
            smem=plan.shared_bytes, prefers_shared=plan.prefers_shared,
        )  # fmt: skip
        return Handoff(plan.fed_constants if product == "gate_up" else None, plan.prefers_shared)

    def _planned(
        self, product: str, weight: QuantizedWeight, source: Any, fed: Mapping[str, int] | None, *, has_norm: bool
    ) -> tuple[LinearW4Plan, bool]:
        """Return the plan, and whether it takes the rows that the product before prepared with the constants `fed`."""
        layout, permuted = self._layout(product, weight), weight.perm is not None
        kind = {"permuted": permuted, "portable": self._portable, "has_norm": has_norm}
        if fed is not None and not permuted:
            plan = _plan(layout, len(source), self._limits, **kind, is_fed=True)
            if plan.prepare_constants == fed:
                return plan, True
        return _plan(layout, len(source), self._limits, **kind), False

    def chunk(self, product: str, y: Any, x: Any, weight: QuantizedWeight, *, alpha: float, beta: float) -> None:
        """y = alpha x weight^T + beta y for many rows, the weight rounded to 16 bits, a slice of its rows at a time."""
        layout, (num_rows, columns) = self._layout(product, weight), weight.shape
        if weight.perm is not None:
            x = self._gathered(x, weight.perm)
        step, constants = slice_rows(num_rows, columns), repack_constants(layout, OWN_FORMAT)
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            values = self._scratch["w4_dequantised"][: count * columns].reshape(count, columns)
            sizes = np.int32(first), np.int32(count), np.int32(num_rows)
            grid = min(-(-count * columns // (1024 * _BLOCK // 32)), 16 * self._limits.num_sms)
            self._launch(DEQUANTIZE, constants, grid, _BLOCK, values, weight.codes, *sizes)
            self._gemm(y[:, first : first + count], x, values, alpha=alpha, beta=beta)

    def _gathered(self, x: Any, perm: Any) -> Any:
        count, columns = x.shape
        name = "w4_permuted_inner" if columns == self._config.intermediate_size else "w4_permuted"
        out = self._scratch[name][: count * columns].reshape(count, columns)
        grid = (-(-columns // (_WIDTH * _BLOCK)), count)
        self._launch(GATHER, {}, grid, _BLOCK, out, x, perm, np.int32(columns))
        return out

    def _layout(self, product: str, weight: QuantizedWeight) -> PackedLayout:
        head_dim = self._config.head_dim if product == "qkv" else 0
        sizes, has_zeros = (*weight.shape, weight.group_size), weight.zeros is not None
        return packed_layout(product, *sizes, self._limits, zeros=has_zeros, head_dim=head_dim, bits=weight.bits)
