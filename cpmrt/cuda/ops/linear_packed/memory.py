"""Quantised weights in the plan of the CUDA executor: their packed regions, and the buffers of their products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.cuda.ops.linear import MAX_ROWS, DeviceLimits
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout
from cpmrt.cuda.ops.linear_packed.plan import ROW_BUCKETS, packed_layout, plan_linear_w4
from cpmrt.memory.packed_regions import PackedRegion, PackedRegions
from cpmrt.models.decoder import DOWN, EMBED, GATE_UP, HEAD, QKV
from cpmrt.ops import QuantizedWeight
from cpmrt.tensor_spec import BufferSpec, TensorSpec

DEQUANTISED_BYTES = 64 << 20
"""At most so much of a weight is in 16 bits at a time, in a prefill."""
_PRODUCTS = {
    "qkv": "qkv", "output": "residual", "gate_up": "gate_up", "down": "residual", "lm_head": "head", "fc": "residual",
    "fc_halves": "residual",
}  # fmt: skip


def layout_of(spec: TensorSpec, config: ModelConfig, limits: DeviceLimits) -> PackedLayout:
    """How a weight with a `quant` is packed. Raises UnsupportedModelError for what the kernels do not take."""
    quant, product = spec.quant, _PRODUCTS[spec.name.rpartition(".")[2]]
    assert quant is not None, spec.name
    num_rows, num_columns = spec.shape
    return packed_layout(
        product, num_rows, num_columns, quant.group_size, limits, zeros=not quant.symmetric,
        head_dim=config.head_dim if product == "qkv" else 0, bits=quant.bits,
    )  # fmt: skip


def layouts_of(specs: Sequence[TensorSpec], config: ModelConfig, limits: DeviceLimits) -> dict[str, PackedLayout]:
    """`layout_of` the quantised weights among `specs`, by name."""
    return {spec.name: layout_of(spec, config, limits) for spec in specs if spec.quant is not None}


def packed_regions(config: ModelConfig, limits: DeviceLimits) -> PackedRegions:
    """`name.codes` holds codes, scales and zero points together; `name.perm` is the order of the columns."""

    def regions(spec: TensorSpec) -> tuple[PackedRegion, ...]:
        assert spec.quant is not None, spec.name
        codes = PackedRegion("codes", (layout_of(spec, config, limits).num_bytes,), 1)
        perm = PackedRegion("perm", (spec.shape[1],), 4)
        return (codes, perm) if spec.quant.permuted else (codes,)

    return regions


def held_weights(specs: Sequence[TensorSpec], arrays: Mapping[str, Any]) -> dict[str, QuantizedWeight]:
    """The quantised weights among `specs` by name; all their arrays but `perm` are the one packed array."""
    held = {}
    for spec in specs:
        if spec.quant is not None:
            packed = arrays[f"{spec.name}.codes"]
            held[spec.name] = QuantizedWeight(
                codes=packed,
                scales=packed,
                zeros=None if spec.quant.symmetric else packed,
                perm=arrays.get(f"{spec.name}.perm"),
                shape=(spec.shape[0], spec.shape[1]),
                group_size=spec.quant.group_size,
                bits=spec.quant.bits,
            )
    return held


def quantised_tables(specs: Sequence[TensorSpec], config: ModelConfig, limits: DeviceLimits) -> tuple[BufferSpec, ...]:
    """What lives as long as the executor: the arrival counters, which every product leaves at zero."""
    counts = [plan.num_arrivals for plan in _plans(specs, config, limits)]
    return (BufferSpec("w4_arrivals", (max(counts),), EMBED, HEAD, itemsize=4),) if any(counts) else ()


def quantised_workspace(
    specs: Sequence[TensorSpec], config: ModelConfig, max_rows: int, limits: DeviceLimits
) -> Iterator[BufferSpec]:
    """Buffers of a step of at most `max_rows` rows."""
    held = [spec for spec in specs if spec.quant is not None]
    plans = list(_plans(held, config, limits))
    for name, itemsize, sizes in (
        ("w4_rows", 1, [plan.prepared_bytes for plan in plans]),
        ("w4_partials", 1, [plan.partial_bytes for plan in plans]),
    ):
        if any(sizes):
            yield BufferSpec(name, (max(sizes),), QKV, HEAD, itemsize=itemsize)
    if fed := max((plan.fed_bytes for plan in plans), default=0):
        yield BufferSpec("w4_fed", (fed // 2,), GATE_UP, DOWN)
    if max_rows <= MAX_ROWS:
        return
    layers = [spec for spec in held if spec.name.rpartition(".")[2] != "lm_head"]
    if layers:
        elements = max(slice_rows(*spec.shape) * spec.shape[1] for spec in layers)
        yield BufferSpec("w4_dequantised", (elements,), QKV, DOWN)
    inner, widths = config.intermediate_size, {spec.shape[1] for spec in layers if spec.quant and spec.quant.permuted}
    if widths - {inner}:
        yield BufferSpec("w4_permuted", (max_rows * max(widths - {inner}),), QKV, GATE_UP)
    if inner in widths:
        first = DOWN if inner not in (config.hidden_size, config.q_size) else QKV
        yield BufferSpec("w4_permuted_inner", (max_rows * inner,), first, DOWN)


def slice_rows(num_rows: int, num_columns: int) -> int:
    """Rows of a weight that are dequantised at a time: equal parts, in multiples of 256."""
    most = max(DEQUANTISED_BYTES // 2 // num_columns // 256, 1) * 256
    parts = -(-num_rows // most)
    return min(-(-num_rows // parts // 256) * 256, num_rows)


def _plans(specs: Sequence[TensorSpec], config: ModelConfig, limits: DeviceLimits) -> Iterator[Any]:
    """Of every product with a quantised weight, at every number of rows; layers repeat the first."""
    seen = set()
    for spec in specs:
        if spec.quant is None:
            continue
        key = layout_of(spec, config, limits), spec.quant.permuted
        if key not in seen:
            seen.add(key)
            yield from (plan_linear_w4(key[0], rows, limits, permuted=key[1]) for rows in ROW_BUCKETS)
