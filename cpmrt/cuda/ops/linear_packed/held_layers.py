"""Holds back the ops of a step of one row until all layers, or the products of one layer, can be launched together.

A step's forward asks for the ops one by one, and each waits for the next. Before anything else is launched, the ops
that wait are. The bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import Operands
from cpmrt.cuda.ops.attention.decode import AttentionScratch, DecodePlan
from cpmrt.cuda.ops.linear import QkvRest, ResidualRest, StepProduct
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.cuda.ops.linear_packed.row_layers import (
    MOST_LAYERS,
    ROW_LAYERS,
    THREADS,
    RowLayersConstants,
    is_taken,
    planned_layer,
    takes_attention,
)
from cpmrt.dtypes import Array

_PRODUCTS = ("residual", "gate_up", "residual", "qkv")
"""The products of a layer: attention into the residual stream, gate and up, down, and the next layer's first one."""
_LAYER = ("attention", *_PRODUCTS)
_NEEDED = 3
_ADDRESS = np.uint64
SHARED = np.dtype(
    [(name, _ADDRESS) for name in ("x", "attention", "inner", "q", "counter", "partials", "arrivals")]
    + [(name, _ADDRESS) for name in ("rope", "positions", "slots", "block_tables")]
    + [(name, np.float32) for name in ("residual_scale", "eps", "score_scale")]
    + [(name, np.int32) for name in ("num_layers", "num_products", "num_splits")]
    + [(name, np.int32) for name in ("num_heads", "num_kv_heads", "pages_per_sequence", "max_context")]
)
"""The struct `Shared` of row_layers.cu: operands and sizes that all layers share."""
OPERANDS = np.dtype(
    [(name, _ADDRESS) for name in ("o", "gate_up", "down", "qkv", "mlp_norm", "norm", "bias", "k_pages", "v_pages")]
)
"""The struct `LayerOperands` of row_layers.cu: the operands of one layer."""


@dataclass(frozen=True, eq=False, slots=True)
class HeldAttention:
    """The op `decode_attention` of one row that sees all its keys; `launch_one` launches it alone."""

    kind: ClassVar[str] = "attention"
    given: Operands
    plan: DecodePlan
    scratch: AttentionScratch
    launch_one: Callable[[], object]

    @property
    def is_taken(self) -> bool:
        rows = self.given.rows
        is_plain = rows.tree_masks is None and rows.reach is None and self.given.selection is None
        return is_plain and takes_attention(self.plan)

    @property
    def row(self) -> tuple[Hashable, ...]:
        """The places of its queries and of the row's position, slot and block table."""
        rows = self.given.rows
        return tuple(map(_place, (self.given.q, rows.positions, rows.slots, rows.block_tables)))

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The values that must be the same in all layers."""
        return self.row, _place(self.given.out), self.given.scale, self.given.kv.k.shape[1]

    @property
    def pages(self) -> tuple[Hashable, ...]:
        return _place(self.given.kv.k), _place(self.given.kv.v)


@dataclass(frozen=True, eq=False, slots=True)
class HeldProduct:
    """A product of one row; `launch_one` launches it alone."""

    product: StepProduct
    weight: PackedWeight
    launch_one: Callable[[], object]

    @property
    def kind(self) -> str:
        return self.product.kind

    @property
    def is_taken(self) -> bool:
        product, layout = self.product, self.weight.layout
        is_plain = self.weight.perm is None and product.row_pitch(layout.in_features) is None
        if not is_plain or not is_taken(layout):
            return False
        if product.kind == "residual":
            return product.bias is None
        has_locations = isinstance(product.rest, QkvRest) and product.rest.locations is not None
        return product.norm is not None and not has_locations

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The values that must be the same in all layers: all but weight, norm, bias and pages."""
        product = self.product
        return self.x, self.out, product.eps, product.fatrelu, self.weight.layout, *map(_place, product.rest)

    @property
    def x(self) -> Hashable:
        return _place(self.product.x)

    @property
    def out(self) -> Hashable:
        return _place(self.product.outputs[0])

    @property
    def row(self) -> tuple[Hashable, ...]:
        """The places of the queries of a product `qkv` and of the row's position, slot and block table."""
        rest = _qkv_rest(self.product)
        return self.out, *map(_place, (rest.positions, rest.slots, rest.block_tables))

    @property
    def pages(self) -> tuple[Hashable, ...]:
        """The places of the pages that a product `qkv` writes keys and values to."""
        return tuple(map(_place, self.product.outputs[1:]))


Held = HeldAttention | HeldProduct


def _order(held: Sequence[Held]) -> tuple[str, ...]:
    """Return the kinds of ops that repeat from layer to layer: with attention only if the held ops begin with it."""
    return _LAYER if isinstance(held[0], HeldAttention) else _PRODUCTS


def _first_layer(held: Sequence[Held]) -> tuple[HeldAttention | None, list[HeldProduct]]:
    """Return the held ops of the first layer: attention, or None without it, and the products so far."""
    ops = held[: len(_order(held))]
    attention = ops[0] if isinstance(ops[0], HeldAttention) else None
    return attention, [op for op in ops if isinstance(op, HeldProduct)]


def _qkv_rest(product: StepProduct) -> QkvRest:
    assert isinstance(product.rest, QkvRest), product.kind
    return product.rest


def _scale(product: StepProduct) -> np.float32:
    """Return the factor of a product `residual`."""
    assert isinstance(product.rest, ResidualRest), product.kind
    return product.rest.scale


def _place(value: KernelArgument) -> Hashable:
    """Return a value that is equal for arguments that are the same to the kernel: a scalar's bytes, or an array's
    address and shape. Stand-ins have no address, so only their shapes are compared."""
    if value is None or isinstance(value, np.generic):
        return None if value is None else value.tobytes()
    return _address(value), tuple(value.shape)


def _address(value: KernelArgument) -> int:
    """Return the address of an array; 0 for None or a stand-in."""
    return int(getattr(getattr(value, "data", None), "ptr", 0))


class HeldLayers:
    """Holds the ops of a step of one row back until they can be launched together.

    It holds whole layers if it is offered attention that the kernel takes, else the products of one layer. `counter` is
    uint64, zero at first; only these launches write to it.
    """

    def __init__(self, launcher: Launcher, device: Device, counter: DeviceArray):
        self._launch, self._device, self._counter = launcher, device, counter
        self._held: list[Held] = []
        self._prefers_shared = False

    def takes_attention(
        self, given: Operands, plan: DecodePlan, scratch: AttentionScratch, launch_one: Callable[[], object]
    ) -> bool:
        """Hold the attention of one row that sees all its keys, as `takes` holds a product; return whether it did."""
        return len(given.q) == 1 and self._take(HeldAttention(given, plan, scratch, launch_one))

    def takes(
        self, product: StepProduct, weight: PackedWeight, launch_one: Callable[[], object], *, prefers_shared: bool
    ) -> bool:
        """Hold a product of one row if it continues the held ops or can begin new ones; return whether it does.

        Held ops are launched together before anything else is launched; those left over by their `launch_one`.
        `prefers_shared` is the same for all products of a model.
        """
        if len(product.x) != 1:
            return False
        self._prefers_shared = prefers_shared
        return self._take(HeldProduct(product, weight, launch_one))

    def _take(self, op: Held) -> bool:
        if not self._goes_on(op):
            self._launch.release()
            if not self._goes_on(op):
                return False
        self._held.append(op)
        self._launch.hold(self._release)
        order = _order(self._held)
        if len(self._held) == len(order) * (MOST_LAYERS if order is _LAYER else 1):
            self._launch.release()
        return True

    def _goes_on(self, op: Held) -> bool:
        held = self._held
        if not op.is_taken:
            return False
        if not held:
            return op.kind in _LAYER[:2]
        order = _order(held)
        place, before = len(held) % len(order), held[-1]
        if op.kind != order[place]:
            return False
        if len(held) < len(order):
            return isinstance(op, HeldProduct) and self._is_linked(op)
        follows = not isinstance(op, HeldAttention) or isinstance(before, HeldProduct) and op.pages == before.pages
        return follows and op.key == held[place].key

    def _is_linked(self, op: HeldProduct) -> bool:
        """Whether the product is the next one of the first layer, on the right operands, and the layer has a plan."""
        attention, products = _first_layer(self._held)
        if not products:
            return attention is not None and op.x == _place(attention.given.out)
        o, before = products[0], products[-1]
        if op.x != before.out:
            return False
        if len(products) < _NEEDED - 1:
            return True
        if op.kind == "residual":
            if op.out != o.out or _scale(op.product) != _scale(o.product):
                return False
        elif op.product.eps != products[1].product.eps or (attention is not None and op.row != attention.row):
            return False
        return self._planned(attention, [*products, op]) is not None

    def _planned(self, attention: HeldAttention | None, products: Sequence[HeldProduct]) -> RowLayersConstants | None:
        layouts = tuple(op.weight.layout for op in products)
        return planned_layer(layouts, self._device, attention.plan if attention else None)

    def _release(self) -> None:
        held, self._held = self._held, []
        size = len(_order(held))
        num_layers, rest = divmod(len(held), size)
        if rest == size - 1:  # the last layer has no product qkv of a next layer
            num_layers, rest = num_layers + 1, 0
        whole = len(held) - rest
        if whole:
            self._launch_layers(num_layers, held[:whole])
        for op in held[whole:]:
            op.launch_one()

    def _launch_layers(self, num_layers: int, held: Sequence[Held]) -> None:
        attention, first = _first_layer(held)
        constants = self._planned(attention, first)
        assert constants is not None
        products = [op for op in held if isinstance(op, HeldProduct)]
        pages = (attention.given.kv.k, attention.given.kv.v) if attention else (None, None)
        shared, operands = self._shared(attention, first), _operands(products, MOST_LAYERS if attention else 1)
        shared["num_layers"], shared["num_products"] = num_layers, len(products)
        self._launch(
            ROW_LAYERS, first[1].product.built(constants), constants.grid, THREADS,
            np.void(shared.tobytes()), *pages, np.void(operands.tobytes()),
            smem=constants.smem_bytes, prefers_shared=self._prefers_shared,
        )  # fmt: skip

    def _shared(self, attention: HeldAttention | None, first: Sequence[HeldProduct]) -> Array:
        """Return the kernel's `Shared`, without the counts of layers and products."""
        o, gate_up = (op.product for op in first[:2])
        arrays: dict[str, KernelArgument] = {"x": o.outputs[0], "attention": o.x, "inner": gate_up.outputs[0]}
        arrays["counter"] = self._counter
        counts = {"residual_scale": _scale(o), "eps": gate_up.eps}
        if len(first) > _NEEDED:
            qkv = first[_NEEDED].product
            rest = _qkv_rest(qkv)
            arrays |= {"q": qkv.outputs[0], "rope": rest.rope, "positions": rest.positions, "slots": rest.slots}
            arrays["block_tables"] = rest.block_tables
            counts |= {"num_heads": rest.num_heads, "num_kv_heads": rest.num_kv_heads}
            counts |= {"pages_per_sequence": rest.pages_per_sequence, "max_context": rest.num_positions}
        if attention is not None:
            given, rows, scratch = attention.given, attention.given.rows, attention.scratch
            arrays |= {"q": given.q, "positions": rows.positions, "slots": rows.slots}
            arrays |= {"block_tables": rows.block_tables, "partials": scratch.partials, "arrivals": scratch.arrivals}
            counts["num_splits"] = attention.plan.num_splits
            counts |= zip(("num_kv_heads", "pages_per_sequence", "score_scale"), given.sizes, strict=True)
        shared = np.zeros((), SHARED)
        for name in SHARED.names or ():
            shared[name] = _address(arrays[name]) if name in arrays else counts.get(name, 0)
        return shared


def _operands(products: Sequence[HeldProduct], most_layers: int) -> Array:
    """Return the `LayerOperands` of each layer, followed by unused ones up to `most_layers`."""
    operands = np.zeros(most_layers, OPERANDS)
    for layer, first in enumerate(range(0, len(products), len(_PRODUCTS))):
        o, gate_up, down, *qkv = products[first : first + len(_PRODUCTS)]
        own: dict[str, KernelArgument] = {"o": o.weight.data, "gate_up": gate_up.weight.data, "down": down.weight.data}
        own["mlp_norm"] = gate_up.product.norm
        if qkv:
            after = qkv[0].product
            own |= {"qkv": qkv[0].weight.data, "norm": after.norm, "bias": after.bias}
            own |= zip(("k_pages", "v_pages"), after.outputs[1:], strict=True)
        for name, array in own.items():
            operands[layer][name] = _address(array)
    return operands
