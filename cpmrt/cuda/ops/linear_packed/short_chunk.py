"""Plans the product of a short prefill chunk with a 4-bit weight: how `packed_gemm*.cu` are compiled and launched.

It has the bits that a longer chunk has, whose weight is unpacked to 16 bits for a dense product that sums along K in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument, row_boxes
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.launch import Dimensions
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, SLICE_COLUMNS, LayoutConstants, PackedLayout

if TYPE_CHECKING:
    from cpmrt.cuda.build.spec import Constants

MOST_ROWS = 128
"""The most rows of a short chunk. On sm_90 and later a weight is unpacked in memory for longer chunks: it then serves
so many rows that this costs less."""
# Tiles of a block: the fewest that leave each multiprocessor at most one block. Blocks with fewer than four would take
# longer to read x than to multiply.
_TILES = (4, 8, 16)
_SMALLEST_GROUP = 32
_FEW_TOKENS, _TOKENS = 16, 64
"""Rows of x that a block takes: the smaller number in chunks with no more rows."""
# packed_gemm.cu: the tiles of a block from which on no two warps share one; the fewest and the most stages.
_UNSHARED_TILES, _FEWEST_STAGES, _MOST_STAGES = 16, 3, 6
# packed_gemm_wgmma.cu: the sizes that its header names.
_WGMMA_CAPABILITY, _BARRIER_BYTES, _BOX_COLUMNS = 90, 16, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortChunkConstants(LayoutConstants):
    """Compile-time constants of packed_gemm_wgmma.cu, which explains them; packed_gemm.cu has all of them too."""

    tokens: int
    tiles: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpGemmConstants(ShortChunkConstants):
    """Compile-time constants of packed_gemm.cu: those of packed_gemm_wgmma.cu, and how many warps share a tile."""

    tile_warps: int = 1


PACKED_GEMM = KernelSpec(
    "packed_gemm", "linear_packed/packed_gemm.cu", "project_residual", WarpGemmConstants, hot=True
)
PACKED_GEMM_WGMMA = KernelSpec(
    "packed_gemm_wgmma", "linear_packed/packed_gemm_wgmma.cu", "project_residual", ShortChunkConstants, hot=True,
    arch="sm_90",
)  # fmt: skip


@dataclass(frozen=True)
class ChunkPlan:
    """The plan of a chunk's product: `grid` blocks of `block` threads, each with `shared_bytes` of shared memory.

    `box_rows`: rows of the boxes of a tensor map, if the kernel takes x as one.
    """

    kernel: KernelSpec
    constants: Constants
    grid: Dimensions
    block: int
    shared_bytes: int
    box_rows: int | None = None

    def rows(self, x: DeviceArray) -> KernelArgument:
        """Return x [M, K], which must stay where it is, as the kernel takes it: the array or a tensor map of it."""
        return x if self.box_rows is None else row_boxes(x, self.box_rows, _BOX_COLUMNS)


def takes_short_chunk(layout: PackedLayout, num_rows: int) -> bool:
    """Tell whether there is a kernel for a short chunk of `num_rows` rows with codes of this kind."""
    return takes_chunk(layout) and num_rows <= MOST_ROWS


def takes_chunk(layout: PackedLayout) -> bool:
    """Tell whether codes of this kind are unpacked in registers."""
    return layout.bits == 4 and layout.zeros != MINIMUMS and layout.scale_group >= _SMALLEST_GROUP


def plan_short_chunk(layout: PackedLayout, num_rows: int, device: Device) -> ChunkPlan:
    """Plan the product of `num_rows` rows with a weight; no choice changes a bit of the result."""
    plan = _wgmma_plan if device.capability == _WGMMA_CAPABILITY else _warp_plan
    return plan(layout, num_rows, device)


def _warp_plan(layout: PackedLayout, num_rows: int, device: Device) -> ChunkPlan:
    tokens = _block_tokens(num_rows)

    def stage_bytes(tiles: int) -> int:
        return _x_bytes(tokens) + tiles * layout.unit_bytes

    tiles = _fewest_tiles(
        layout, device, [each for each in _TILES if stage_bytes(each) * _FEWEST_STAGES <= device.shared_bytes_per_block]
    )
    stages = min(_MOST_STAGES, device.shared_bytes_per_block // stage_bytes(tiles))
    warps = 1 if tiles >= _UNSHARED_TILES or tokens == _FEW_TOKENS else 2
    constants = WarpGemmConstants(**layout.sizes, tiles=tiles, stages=stages, tokens=tokens, tile_warps=warps)
    grid = ceil(layout.num_tiles / tiles), ceil(num_rows / tokens)
    return ChunkPlan(PACKED_GEMM, constants, grid, 32 * tiles * warps, stages * stage_bytes(tiles))


def _wgmma_plan(layout: PackedLayout, num_rows: int, device: Device) -> ChunkPlan:
    tiles = _fewest_tiles(layout, device, _TILES)
    tokens = _block_tokens(num_rows)
    # A block takes all of the shared memory: a second one on the same multiprocessor would make both slower.
    stage_bytes = _x_bytes(tokens) + tiles * layout.unit_bytes + _BARRIER_BYTES
    stages = device.shared_bytes_per_block // stage_bytes
    constants = ShortChunkConstants(**layout.sizes, tokens=tokens, tiles=tiles, stages=stages)
    grid = ceil(layout.num_tiles / tiles), ceil(num_rows / tokens)
    return ChunkPlan(PACKED_GEMM_WGMMA, constants, grid, 32 * (tiles + 1), stages * stage_bytes, box_rows=tokens)


def _fewest_tiles(layout: PackedLayout, device: Device, choices: Sequence[int]) -> int:
    return next((tiles for tiles in choices if layout.num_tiles <= tiles * device.num_sms), choices[-1])


def _block_tokens(num_rows: int) -> int:
    return _FEW_TOKENS if num_rows <= _FEW_TOKENS else _TOKENS


def _x_bytes(tokens: int) -> int:
    """Return the bytes of a slice of x in shared memory."""
    return tokens * SLICE_COLUMNS * 2
