"""Plans the launch of all layers of a step of one row, or of the four products between two attentions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import QUERY_TILE
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.ops.linear import STARTS_EARLY
from cpmrt.cuda.ops.linear_packed.division import SINGLE_ROW_SUMS
from cpmrt.cuda.ops.linear_packed.layout import RUNS, SLICE_COLUMNS, TILE_ROWS, PackedLayout
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.tensor_spec import PLAIN_HEAD_DIM, TensorSpec

THREADS = 256
"""Threads of a block: eight warps, one for each run of K."""
_BITS, _SCALE_GROUP = 4, 128
MOST_LAYERS = 54
"""The most layers of a launch: the operands of so many fit into its parameters."""
# The most tiles of a warp in one product: the sums of all are in registers.
_MOST_ROUNDS = 6
_STAGE_SLICES = 4  # that a warp has in shared memory at a time, of a row that is not normalised
_CHUNK_SLICES = 2  # of a chunk of weights
_FEWEST_SLOTS, _MOST_SLOTS = 3, 8  # chunks of a warp's ring
PAGE_STAGES = 2
"""Pages of a warp's ring in attention."""
_HEAD_DIMS = (64, 128)  # others spill registers
# Bytes of shared memory:
_FIXED_BYTES = 64  # before the sums: square sums and the row's place
_SUM_BYTES = 64  # the sums of a tile and run
_LOG_SUM_BYTES = 256  # the logarithms of the sums of attention's four warps
_ALIGNED_BYTES = 128  # what the rings begin at a multiple of
_SLICE_BYTES = 2 * SLICE_COLUMNS + SINGLE_ROW_SUMS  # a slice of the row
_STATIC_BYTES = 1024  # beside the dynamic ones, with attention: a flag, and room to begin at a multiple of this
# The size that weights must stay below, because offsets in a weight are 32-bit integers.
_MOST_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class RowLayersConstants:
    """Compile-time constants of row_layers.cu, which explains them."""

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
    attends: bool = False
    group: int | None = None
    page_stages: int | None = None
    fatrelu: int | None = None


ROW_LAYERS = KernelSpec(
    "row_layers", "linear_packed/row_layers.cu", "gate_up", RowLayersConstants, hot=True,
    waits_across_blocks=lambda macros: True,
)  # fmt: skip


def joins_products(specs: Iterable[TensorSpec], device: Device) -> bool:
    """Tell whether a model with these weights may have a layer's products in one launch, if `plan_layer` plans it."""
    are_packed = any(spec.quant and spec.product == "gate_up" for spec in specs)
    return are_packed and device.capability < STARTS_EARLY


def plan_layer(
    layouts: Sequence[PackedLayout], device: Device, attention: DecodePlan | None = None
) -> RowLayersConstants | None:
    """Plan the launch of a layer's products with weights of these layouts: o, gate_up, down and the next layer's qkv.

    Without qkv the layer is the last one. With `attention` each layer begins with its attention. Returns None for a
    device, kind or size that the kernel does not take.
    """
    o, gate_up, down, *qkv = layouts
    if device.capability >= STARTS_EARLY or not all(map(is_taken, layouts)):
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
    room, of_attention, heads = device.shared_bytes_per_block, 0, None if attention is None else attention.constants
    if heads is not None:
        room -= _STATIC_BYTES
        of_attention = (QUERY_TILE * 2 + PAGE_STAGES * PAGE_SIZE * 4) * heads.head_dim + _LOG_SUM_BYTES
    fixed = ceil(fixed / _ALIGNED_BYTES) * _ALIGNED_BYTES
    slot_bytes = warps * _CHUNK_SLICES * gate_up.unit_bytes
    slots = min(_MOST_SLOTS, (room - fixed) // slot_bytes)
    smem_bytes = fixed + max(slots * slot_bytes, of_attention)  # attention and the rings use it in turn
    if max(rounds) > _MOST_ROUNDS or max(places) >= _MOST_BYTES or slots < _FEWEST_SLOTS or smem_bytes > room:
        return None
    plan = RowLayersConstants(
        o.out_features, o.in_features, down.in_features, qkv[0].out_features if qkv else TILE_ROWS,
        qkv[0].head_dim if qkv else PLAIN_HEAD_DIM, bool(qkv), RUNS, gate_up.runs, _BITS, _SCALE_GROUP, 0, grid,
        slots, smem_bytes,
    )  # fmt: skip
    return plan if heads is None else replace(plan, attends=True, group=heads.group, page_stages=PAGE_STAGES)


def is_taken(layout: PackedLayout) -> bool:
    """Whether row_layers.cu takes weights of this layout."""
    kind = layout.bits, layout.scale_group, layout.zeros
    has_runs = layout.runs == RUNS or layout.product == "gate_up"
    return kind == (_BITS, _SCALE_GROUP, 0) and has_runs and layout.out_features % TILE_ROWS == 0


def takes_attention(attention: DecodePlan) -> bool:
    """Whether row_layers.cu takes heads of this size and pages of this type."""
    return attention.constants.head_dim in _HEAD_DIMS and not attention.constants.fp8


planned_layer = lru_cache(maxsize=64)(plan_layer)
