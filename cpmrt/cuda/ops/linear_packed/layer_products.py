"""The four products between one layer's attention and the next one's, in one launch (`layer_products.cu`).

A step's forward asks for them one by one. Each waits for the next, until all are there or something else comes, which
has those that wait launched first. The bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import StepProduct
from cpmrt.cuda.ops.linear_packed.layout import RUNS, TILE_ROWS, PackedLayout, PackedWeight
from cpmrt.tensor_spec import PLAIN_HEAD_DIM, TensorSpec

THREADS = 256
"""Threads of a block: eight warps, one for each run of K."""
# From this capability on a kernel begins while the one before it ends, and a launch of its own costs less.
_STARTS_EARLY = 90
_BITS, _SCALE_GROUP = 4, 128
_ORDER = ("residual", "gate_up", "residual", "qkv")
"""The products: attention into the residual stream, gate and up, down, and the next layer's first one."""
_NEEDED = 3
# Tiles of a warp in one product: the sums of all are in registers.
_MOST_ROUNDS = 6
# Of a row that is not normalised a warp has so many slices in shared memory at a time; slices of a chunk of weights;
# chunks of a warp's ring.
_STAGE_SLICES, _CHUNK_SLICES, _FEWEST_SLOTS, _MOST_SLOTS = 4, 2, 3, 8
# Shared memory before the sums: square sums, the row's place. Sums of a tile and run; a slice of the row.
_FIXED_BYTES, _SUM_BYTES, _SLICE_BYTES = 64, 64, 320
# Places in a weight are 32-bit integers.
_MOST_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class LayerProductsConstants:
    """Compile-time constants of layer_products.cu, which explains them."""

    in_features: int
    attention: int
    inner: int
    qkv_rows: int
    head_dim: int
    next: bool
    runs: int
    gate_up_runs: int
    weight_bits: int
    scale_group: int
    zeros: int
    grid: int
    slots: int
    smem_bytes: int
    fatrelu: int | None = None


LAYER_PRODUCTS = KernelSpec(
    "layer_products", "linear_packed/layer_products.cu", "gate_up", LayerProductsConstants, hot=True,
    waits_across_blocks=lambda macros: True,
)  # fmt: skip


def joins_products(specs: Iterable[TensorSpec], device: Device) -> bool:
    """Tell whether a model with these weights has a layer's products in one launch, where `plan_layer` has a plan."""
    are_packed = any(spec.quant and spec.product == "gate_up" for spec in specs)
    return are_packed and device.capability < _STARTS_EARLY


def plan_layer(layouts: Sequence[PackedLayout], device: Device) -> LayerProductsConstants | None:
    """Plan the launch of products with weights of these layouts, in their order; without the last one a layer ends.

    Returns None where they are of a kind or size that the kernel does not take.
    """
    o, gate_up, down, *qkv = layouts
    if device.capability >= _STARTS_EARLY or not all(map(_is_taken, layouts)):
        return None
    if not (o.out_features == down.out_features == gate_up.in_features == (qkv or [gate_up])[0].in_features):
        return None
    grid, warps = device.num_sms, RUNS
    at_once = [grid if layout.runs > 1 else grid * warps for layout in layouts]
    rounds = [ceil(layout.num_tiles / tiles) for layout, tiles in zip(layouts, at_once, strict=True)]
    places = [layout.tile_bytes * tiles * most for layout, tiles, most in zip(layouts, at_once, rounds, strict=True)]
    shared_rounds = max(most if layout.runs > 1 else 1 for layout, most in zip(layouts, rounds, strict=True))
    row_slices = max(gate_up.num_slices, *(warps * min(layout.run_slices, _STAGE_SLICES) for layout in (o, down)))
    fixed = _FIXED_BYTES + shared_rounds * warps * _SUM_BYTES + row_slices * _SLICE_BYTES
    slot_bytes = warps * _CHUNK_SLICES * gate_up.unit_bytes
    slots = min(_MOST_SLOTS, (device.shared_bytes_per_block - fixed) // slot_bytes)
    if max(rounds) > _MOST_ROUNDS or max(places) >= _MOST_BYTES or slots < _FEWEST_SLOTS:
        return None
    return LayerProductsConstants(
        o.out_features, o.in_features, down.in_features, qkv[0].out_features if qkv else TILE_ROWS,
        qkv[0].head_dim if qkv else PLAIN_HEAD_DIM, bool(qkv), RUNS, gate_up.runs, _BITS, _SCALE_GROUP, 0, grid, slots,
        fixed + slots * slot_bytes,
    )  # fmt: skip


def _is_taken(layout: PackedLayout) -> bool:
    kind = layout.bits, layout.scale_group, layout.zeros
    has_runs = layout.runs == RUNS or layout.product == "gate_up"
    return kind == (_BITS, _SCALE_GROUP, 0) and has_runs and layout.out_features % TILE_ROWS == 0


_plan = lru_cache(maxsize=64)(plan_layer)


class LayerProducts:
    """Holds the products of a layer back until they can be launched together. `launch_one` launches one alone.

    `counter` is uint64, zero at first; only these launches write to it.
    """

    def __init__(
        self, launcher: Launcher, device: Device, counter: DeviceArray,
        launch_one: Callable[[StepProduct, PackedWeight], object],
    ):  # fmt: skip
        self._launch, self._device, self._counter, self._launch_one = launcher, device, counter, launch_one
        self._held: list[tuple[StepProduct, PackedWeight]] = []
        self._prefers_shared = False

    def takes(self, product: StepProduct, weight: PackedWeight, *, prefers_shared: bool) -> bool:
        """Take a product of one row, if it goes on with those that are held; it is launched with them, or before
        anything else is. `prefers_shared` is the same for all products of a model."""
        if len(product.x) != 1:
            return False
        if not self._goes_on(product, weight):
            self._launch.release()
            if not self._goes_on(product, weight):
                return False
        self._held.append((product, weight))
        self._prefers_shared = prefers_shared
        self._launch.hold(self._release)
        if len(self._held) == len(_ORDER):
            self._launch.release()
        return True

    def _goes_on(self, product: StepProduct, weight: PackedWeight) -> bool:
        place = len(self._held)
        is_plain = weight.perm is None and product.row_pitch(weight.layout.in_features) is None
        if product.kind != _ORDER[place] or not is_plain or not _is_taken(weight.layout):
            return False
        if product.rest[0] is not None if product.kind == "residual" else product.norm is None:
            return False
        if not self._held:
            return True
        (first, _), (before, _) = self._held[0], self._held[-1]
        stream = first.outputs[0]
        is_linked = product.x is before.outputs[0]
        if place < _NEEDED - 1:
            return is_linked
        if product.kind == "residual":
            is_linked = is_linked and product.outputs[0] is stream and product.rest[-1] == first.rest[-1]
        else:
            is_linked = is_linked and product.eps == self._held[1][0].eps
        return is_linked and _plan(self._layouts(weight), self._device) is not None

    def _layouts(self, *more: PackedWeight) -> tuple[PackedLayout, ...]:
        return tuple(weight.layout for weight in (*(weight for _, weight in self._held), *more))

    def _release(self) -> None:
        held, layouts = self._held, self._layouts()
        self._held = []
        if len(held) < _NEEDED:
            for product, weight in held:
                self._launch_one(product, weight)
            return
        constants = _plan(layouts, self._device)
        assert constants is not None
        (o, o_weight), (gate_up, gate_up_weight), (down, down_weight) = held[:_NEEDED]
        after: tuple[KernelArgument, ...] = (*(None,) * 11, *(np.int32(0),) * 4)
        if constants.next:
            (qkv, qkv_weight) = held[_NEEDED]
            bias, *places = qkv.rest[:6]
            after = qkv.norm, qkv_weight.data, *qkv.outputs, bias, *places, *qkv.rest[7:11]
        self._launch(
            LAYER_PRODUCTS, gate_up.built(constants), constants.grid, THREADS,
            o.outputs[0], o.x, gate_up.outputs[0], o_weight.data, gate_up.norm, gate_up_weight.data, down_weight.data,
            self._counter, o.rest[-1], np.float32(gate_up.eps), *after,
            smem=constants.smem_bytes, prefers_shared=self._prefers_shared,
        )  # fmt: skip
