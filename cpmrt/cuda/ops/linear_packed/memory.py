"""Packed weights in the plan of the CUDA executor: their regions, and the buffers of their products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight, packed_layout
from cpmrt.cuda.ops.linear_packed.plan import ROW_BUCKETS, PackedPlan, plan_packed
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.packed_regions import PackedRegion
from cpmrt.models.layers import DOWN, EMBED, GATE_UP, HEAD, QKV
from cpmrt.tensor_spec import BufferSpec, TensorSpec

UNPACKED_BYTES = 64 << 20
"""At most so much of a weight is in 16 bits at a time, in a prefill."""


def packed_regions(device: Device, spec: TensorSpec) -> tuple[PackedRegion, ...]:
    """Return the regions of a weight with a `quant`: all its bytes, and the order of its columns if it has one."""
    codes, perm = (packed_layout(spec, device).num_bytes,), (spec.shape[1],)
    order = (PackedRegion("perm", perm, np.int32),) if spec.quant and spec.quant.permuted else ()
    return (PackedRegion("codes", codes, np.uint8), *order)


def held_weights(
    specs: Iterable[TensorSpec], arrays: Mapping[str, Any], device: Device
) -> dict[str, PackedWeight]:
    """Return the quantised weights among `specs`, whose regions are among `arrays`, by name."""
    layouts = {spec.name: packed_layout(spec, device) for spec in specs if spec.quant is not None}
    return {
        name: PackedWeight(arrays[f"{name}.codes"], arrays.get(f"{name}.perm"), layout)
        for name, layout in layouts.items()
    }


@dataclass(frozen=True, slots=True)
class PackedScratch:
    """The buffers of products with packed weights; None where no weight of the model needs it.

    `rows` are prepared for one product, `fed` by one product for the next; blocks exchange `partials` and count them in
    `arrivals`, which is zero between launches. A chunk's products unpack a part of the weight to `unpacked`, and put
    the columns of their rows into the weight's order in `permuted`, or `permuted_inner` [T, intermediate_size].
    """

    rows: DeviceArray | None = None
    fed: DeviceArray | None = None
    partials: DeviceArray | None = None
    arrivals: DeviceArray | None = None
    unpacked: DeviceArray | None = None
    permuted: DeviceArray | None = None
    permuted_inner: DeviceArray | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> PackedScratch:
        """Return those among arrays by name: those of `packed_tables` and `packed_workspace`."""
        return cls(**{field.name: arrays.get(f"packed_{field.name}") for field in fields(cls)})


def packed_tables(specs: Iterable[TensorSpec], device: Device) -> tuple[BufferSpec, ...]:
    """Return what lives as long as the executor: the arrival counters, which every product leaves at zero."""
    counts = [plan.num_arrivals for plan in _plans(specs, device)]
    return (BufferSpec("packed_arrivals", (max(counts),), EMBED, HEAD, np.int32),) if any(counts) else ()


def packed_workspace(
    specs: Sequence[TensorSpec], config: ModelConfig, max_rows: int, device: Device
) -> Iterator[BufferSpec]:
    """Return the buffers of a step of at most `max_rows` rows."""
    held = [spec for spec in specs if spec.quant is not None]
    plans = list(_plans(held, device))
    for name, sizes in (
        ("packed_rows", [plan.prepared_bytes for plan in plans]),
        ("packed_partials", [plan.partial_bytes for plan in plans]),
    ):
        if any(sizes):
            yield BufferSpec(name, (max(sizes),), QKV, HEAD, np.uint8)
    if fed := max((plan.fed_bytes for plan in plans), default=0):
        yield BufferSpec("packed_fed", (fed // 2,), GATE_UP, DOWN)
    layers = [spec for spec in held if spec.product != "head"]
    if max_rows > MAX_ROWS and layers:
        yield from _chunk_workspace(layers, config, max_rows)


def _chunk_workspace(layers: Sequence[TensorSpec], config: ModelConfig, max_rows: int) -> Iterator[BufferSpec]:
    elements = max(slice_rows(*spec.shape) * spec.shape[1] for spec in layers)
    yield BufferSpec("packed_unpacked", (elements,), QKV, DOWN)
    inner = config.mlp.intermediate_size
    widths = {spec.shape[1] for spec in layers if spec.quant and spec.quant.permuted}
    if widths - {inner}:
        yield BufferSpec("packed_permuted", (max_rows * max(widths - {inner}),), QKV, GATE_UP)
    if inner in widths:
        first = DOWN if inner not in (config.hidden_size, config.attention.q_size) else QKV
        yield BufferSpec("packed_permuted_inner", (max_rows, inner), first, DOWN)


def slice_rows(num_rows: int, num_columns: int) -> int:
    """Return the rows of a weight that are unpacked at a time: equal parts, in multiples of 256."""
    most = max(UNPACKED_BYTES // 2 // num_columns // 256, 1) * 256
    parts = -(-num_rows // most)
    return min(-(-num_rows // parts // 256) * 256, num_rows)


def _plans(specs: Iterable[TensorSpec], device: Device) -> Iterator[PackedPlan]:
    """Plan every product with a packed weight at every number of rows; layers repeat the first."""
    weights = ((packed_layout(spec, device), spec.quant.permuted) for spec in specs if spec.quant)
    for layout, permuted in dict.fromkeys(weights):
        yield from (plan_packed(layout, rows, device, permuted=permuted) for rows in ROW_BUCKETS)
