"""Products with packed weights: few rows in one kernel, a chunk with the weight unpacked slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear import StepProduct
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight, RepackConstants
from cpmrt.cuda.ops.linear_packed.memory import PackedScratch, slice_rows
from cpmrt.cuda.ops.linear_packed.plan import (
    LINEAR_PACKED,
    PREPARE,
    PREPARE_THREADS,
    PackedPlan,
    PrepareConstants,
    plan_packed,
)
from cpmrt.ops import Handoff

DEQUANTIZE = KernelSpec(
    "dequantize", "linear_packed/repack.cu", constants=RepackConstants, hot=True,
    reason="4-bit weights of a prefill chunk",
)  # fmt: skip
GATHER = KernelSpec("gather_columns", "linear_packed/gather.cu", "project_residual", hot=True)
_plan = lru_cache(maxsize=1024)(plan_packed)
_BLOCK = 256
_WIDTH = 8
"""Elements that a thread of the gathering kernel moves."""


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """Rows as a packed product reads them: what `PREPARE`, built with these constants, makes of them."""

    rows: DeviceArray | None
    constants: PrepareConstants


class PackedProducts:
    """Launches the products with packed weights of one model; `arrays` holds the buffers of `PackedScratch` by name."""

    def __init__(self, launcher: Launcher, gemm: Gemm, arrays: Mapping[str, Any], device: Device):
        self._launch, self._gemm, self._device = launcher, gemm, device
        self._scratch = PackedScratch.of(arrays)

    def step(self, product: StepProduct, weight: PackedWeight, after: Handoff) -> Handoff:
        """Launch a product of 1 to 64 rows, fused as with a weight in 16 bits; `after`: what its rows' op has left."""
        scratch, (plan, x) = self._scratch, self._planned(product, weight, after.prepared)
        left = Prepared(scratch.fed, plan.fed) if plan.fed else None
        exchanged = (scratch.partials, scratch.arrivals) if plan.num_arrivals else (None, None)
        more = (left.rows if left else None,) if product.kind == "gate_up" else ()
        self._launch(
            LINEAR_PACKED[product.kind], plan.constants, plan.grid, plan.block,
            *product.arguments(x, (weight.data, *exchanged), more),
            smem=plan.shared_bytes, prefers_shared=plan.prefers_shared,
        )  # fmt: skip
        return Handoff(left, plan.prefers_shared)

    def _planned(
        self, product: StepProduct, weight: PackedWeight, fed: Prepared | None
    ) -> tuple[PackedPlan, DeviceArray | None]:
        """Return the plan, and the rows in the form in which it reads them: prepared by the product before if that was
        for this plan, else as they are, or prepared now."""
        x, has_norm, permuted = product.x, product.norm is not None, weight.perm is not None
        if fed is not None and not permuted:
            plan = _plan(weight.layout, len(x), self._device, has_norm=has_norm, is_fed=True)
            if plan.prepare == fed.constants:
                return plan, fed.rows
        plan = _plan(weight.layout, len(x), self._device, has_norm=has_norm, permuted=permuted)
        if not plan.constants.prepared:
            return plan, x
        eps, rows = np.float32(product.eps), self._scratch.rows
        self._launch(PREPARE, plan.prepare, len(x), PREPARE_THREADS, rows, x, product.norm, weight.perm, eps)
        return plan, rows

    def chunk(self, y: DeviceArray, x: DeviceArray, weight: PackedWeight, *, alpha: float, beta: float) -> None:
        """y = alpha x weight^T + beta y for many rows, the weight rounded to 16 bits, a slice of its rows at a time."""
        (num_rows, columns), unpacked = weight.shape, self._scratch.unpacked
        assert unpacked is not None, "planned without chunks"
        if weight.perm is not None:
            x = self._gathered(x, weight.perm)
        step, constants = slice_rows(num_rows, columns), weight.layout.repack_constants()
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            values = unpacked[: count * columns].reshape(count, columns)
            sizes = np.int32(first), np.int32(count), np.int32(num_rows)
            grid = min(-(-count * columns // (1024 * _BLOCK // 32)), 16 * self._device.num_sms)
            self._launch(DEQUANTIZE, constants, grid, _BLOCK, values, weight.data, *sizes)
            self._gemm(y[:, first : first + count], x, values, alpha=alpha, beta=beta)

    def _gathered(self, x: DeviceArray, perm: DeviceArray) -> DeviceArray:
        """Return the rows with their columns in the order of the weight's."""
        (count, columns), scratch = x.shape, self._scratch
        inner, other = scratch.permuted_inner, scratch.permuted
        if inner is not None and inner.shape[1] == columns:
            out = inner[:count]
        else:
            assert other is not None, "planned without an order of columns"
            out = other[: count * columns].reshape(count, columns)
        grid = (-(-columns // (_WIDTH * _BLOCK)), count)
        self._launch(GATHER, {}, grid, _BLOCK, out, x, perm, np.int32(columns))
        return out
