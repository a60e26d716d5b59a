"""The four products between one layer's attention and the next one's, in one launch (`layer_products.cu`).

A step's forward asks for them one by one. Each waits for the next, until all are there or something else comes, which
has those that wait launched first. The bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import StepProduct
from cpmrt.cuda.ops.linear_packed.layout import RUNS, SLICE_COLUMNS, TILE_ROWS, PackedLayout, PackedWeight, whole_lines
from cpmrt.tensor_spec import PLAIN_HEAD_DIM

_BITS = 4
_THREADS = 512
_ORDER = ("residual", "gate_up", "residual", "qkv")
"""The products: attention into the residual stream, gate and up, down, and the next layer's first one."""
_NEEDED = 3
_HEAD_DIMS = (64, 128)
"""Those that were tested. A layer with heads of 96 gave wrong values on a GPU; the cause is not known."""
# Shared memory before the row: barriers, square sums, the place of the token. And of sums, a tile of gate_up's.
_FIXED_BYTES, _TILE_SUM_BYTES = 576, 512


@dataclass(frozen=True, slots=True)
class LayerProductsConstants:
    """Compile-time constants of layer_products.cu, which explains them."""

    in_features: int
    attention: int
    inner: int
    qkv_rows: int
    head_dim: int
    next: bool
    weight_bits: int
    runs: int
    scale_group: int
    zeros: int
    grid: int
    smem_bytes: int
    late: bool
    portable: bool
    fatrelu: int | None = None


LAYER_PRODUCTS = KernelSpec(
    "layer_products", "linear_packed/layer_products.cu", "gate_up", LayerProductsConstants, hot=True,
    waits_across_blocks=lambda macros: True,
)  # fmt: skip


def plan_layer(layouts: Sequence[PackedLayout], device: Device) -> LayerProductsConstants | None:
    """Plan the launch of products with weights of these layouts, in their order; without the last one a layer ends.

    Returns None where the weights do not fit into the shared memory of all multiprocessors together, or are of a kind
    that the kernel does not take.
    """
    o, gate_up, down, *qkv = layouts
    kinds = {(layout.bits, layout.runs, layout.scale_group, layout.zeros) for layout in layouts}
    if len(kinds) > 1 or not _starts(o) or any(layout.head_dim not in _HEAD_DIMS for layout in qkv):
        return None
    hidden, grid = o.out_features, min(device.num_sms, gate_up.num_tiles)
    columns = max(layout.in_features for layout in layouts)
    slice_bytes = SLICE_COLUMNS * 2 + max(16, SLICE_COLUMNS // o.scale_group * 4)
    row_bytes = whole_lines(
        _FIXED_BYTES + ceil(gate_up.num_tiles / grid) * _TILE_SUM_BYTES + columns // SLICE_COLUMNS * slice_bytes
    )
    parts = [_most_weights(layouts, grid, part) for part in (slice(2), slice(2, None))]
    space, together = device.shared_bytes_per_block - row_bytes, _most_weights(layouts, grid, slice(None))
    late = together > space
    smem_bytes = row_bytes + (max(parts) if late else together)
    are_rows = all(layout.out_features % TILE_ROWS == 0 for layout in layouts)
    fits = max(map(_tiles, layouts)) == gate_up.num_tiles and smem_bytes <= device.shared_bytes_per_block
    if not (fits and are_rows and hidden == down.out_features == gate_up.in_features):
        return None
    return LayerProductsConstants(
        hidden, o.in_features, down.in_features, qkv[0].out_features if qkv else TILE_ROWS,
        qkv[0].head_dim if qkv else PLAIN_HEAD_DIM, bool(qkv), o.bits, o.runs, o.scale_group, o.zeros, grid, smem_bytes,
        late, device.is_portable,
    )  # fmt: skip


def _tiles(layout: PackedLayout) -> int:
    return layout.num_tiles


def _most_weights(layouts: Sequence[PackedLayout], grid: int, part: slice) -> int:
    """Bytes of these weights in the block that has most of them: tiles of all are dealt out to the blocks in turn."""
    held, dealt = [0] * grid, 0
    for place, layout in enumerate(layouts):
        for tile in range(layout.num_tiles if place in range(len(layouts))[part] else 0):
            held[(dealt + tile) % grid] += layout.runs * layout.run_bytes
        dealt += layout.num_tiles
    return max(held)


_plan = lru_cache(maxsize=64)(plan_layer)


class LayerProducts:
    """Holds the products of a layer back until they can be launched together. `launch_one` launches one alone."""

    def __init__(
        self, launcher: Launcher, device: Device, counter: DeviceArray | None,
        launch_one: Callable[[StepProduct, PackedWeight], object],
    ):  # fmt: skip
        self._launch, self._device, self._counter, self._launch_one = launcher, device, counter, launch_one
        self._held: list[tuple[StepProduct, PackedWeight]] = []

    def takes(self, product: StepProduct, weight: PackedWeight) -> bool:
        """Take a product of one row, if it goes on with those that are held; it is launched with them, or before
        anything else is."""
        if self._counter is None or len(product.x) != 1 or not self._goes_on(product, weight):
            return False
        self._held.append((product, weight))
        self._launch.hold(self._release)
        if len(self._held) == len(_ORDER):
            self._launch.release()
        return True

    def _goes_on(self, product: StepProduct, weight: PackedWeight) -> bool:
        place = len(self._held)
        if product.kind != _ORDER[place] or weight.perm is not None:
            return False
        if product.kind == "residual" and product.rest[0] is not None:
            return False
        if not self._held:
            return _starts(weight.layout)
        (first, _), (before, _) = self._held[0], self._held[-1]
        stream = first.outputs[0]
        reads = before.outputs[0] if place == 2 else stream
        is_linked = product.x is reads and (place != 2 or product.outputs[0] is stream)
        if place < _NEEDED - 1:
            return is_linked
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
        factor, eps = o.rest[-1], np.float32(gate_up.eps)
        assert factor == down.rest[-1]
        after: tuple[KernelArgument, ...] = (*(None,) * 11, *(np.int32(0),) * 4)
        if constants.next:
            (qkv, qkv_weight) = held[_NEEDED]
            bias, *places = qkv.rest[:6]
            after = qkv.norm, qkv_weight.data, *qkv.outputs, bias, *places, *qkv.rest[7:11]
        self._launch(
            LAYER_PRODUCTS, gate_up.built(constants), constants.grid, _THREADS,
            o.outputs[0], o.x, gate_up.outputs[0], o_weight.data, gate_up.norm, gate_up_weight.data, down_weight.data,
            self._counter, factor, eps, *after, smem=constants.smem_bytes, prefers_shared=True,
        )  # fmt: skip


def _starts(layout: PackedLayout) -> bool:
    """Whether a product with such a weight may be the first: one with symmetric groups of 128."""
    return (layout.bits, layout.runs, layout.scale_group, layout.zeros) == (_BITS, RUNS, SLICE_COLUMNS, 0)
