"""Plans the product of a long prefill chunk with a 4-bit weight: how `packed_gemm_wide.cu` is compiled and launched.

Its bits are those of other devices, which unpack the weight to 16 bits and compute a dense product that sums along K in
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import TILE_ROWS
from cpmrt.cuda.ops.linear_packed.layout import SLICE_COLUMNS, LayoutConstants, PackedLayout
from cpmrt.cuda.ops.linear_packed.short_chunk import ChunkPlan, takes_chunk

# From sm_90 on a library's products, which take weights in 16 bits, are so much faster that unpacking them pays.
_DENSE_CAPABILITY = 90
# Packed tiles of a block, two to a warp -> the time of a tile relative to the widest block (estimated).
_TILE_COST = {16: 1.0, 8: 1.1, 4: 1.3}
_THREADS_PER_TILE, _MOST_STAGES, _FEWEST_STAGES = 16, 4, 3
_HALF_COLUMNS = SLICE_COLUMNS // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LongChunkConstants(LayoutConstants):
    """Compile-time constants of packed_gemm_wide.cu, which explains them."""

    tiles: int
    stages: int
    gated: bool | None = None
    fatrelu: int | None = None


PACKED_GEMM_WIDE = KernelSpec(
    "packed_gemm_wide", "linear_packed/packed_gemm_wide.cu", "project_residual", LongChunkConstants, hot=True
)


def takes_long_chunk(layout: PackedLayout, device: Device) -> bool:
    """Tell whether a chunk of any number of rows is multiplied without unpacking the weight in memory."""
    return takes_chunk(layout) and device.capability < _DENSE_CAPABILITY


def plan_long_chunk(layout: PackedLayout, num_rows: int, device: Device) -> ChunkPlan:
    """Plan the product of `num_rows` rows with a weight; no choice changes a bit of the result."""
    row_tiles = ceil(num_rows / TILE_ROWS)

    def blocks(tiles: int) -> int:
        return row_tiles * ceil(layout.num_tiles / tiles)

    # The multiprocessor with the most blocks ends last; its blocks share its tensor cores.
    tiles = min(_TILE_COST, key=lambda tiles: ceil(blocks(tiles) / device.num_sms) * tiles * _TILE_COST[tiles])
    stages = min(_MOST_STAGES, device.shared_bytes_per_block // _stage_bytes(layout, tiles))
    assert stages >= _FEWEST_STAGES, "a device with less than 84 KB of shared memory"
    constants = LongChunkConstants(**layout.sizes, tiles=tiles, stages=stages)
    shared_bytes = stages * _stage_bytes(layout, tiles)
    return ChunkPlan(PACKED_GEMM_WIDE, constants, blocks(tiles), _THREADS_PER_TILE * tiles, shared_bytes)


def _stage_bytes(layout: PackedLayout, tiles: int) -> int:
    """Return the bytes of x and w in shared memory for half a slice."""
    unit_groups = SLICE_COLUMNS // layout.scale_group
    group_bytes = (layout.unit_bytes - layout.code_bytes) // unit_groups
    scales = max(1, _HALF_COLUMNS // layout.scale_group) * group_bytes
    return TILE_ROWS * _HALF_COLUMNS * 2 + tiles * (layout.code_bytes // 2 + scales)
