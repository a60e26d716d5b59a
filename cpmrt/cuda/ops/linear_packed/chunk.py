"""Plans the product of a prefill chunk with a packed weight: how the `packed_gemm*.cu` are compiled and launched.

They unpack the weight in registers. Their bits are those of a weight unpacked to 16 bits in memory and a dense product
that sums along K in order, so a choice among them changes no bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument, row_boxes
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.launch import Dimensions
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, SCALE_GROUPS, SLICE_COLUMNS, LayoutConstants, PackedLayout

if TYPE_CHECKING:
    from cpmrt.cuda.build.spec import Constants

_WGMMA_CAPABILITY = 90
# Devices whose library multiplies with instructions that the kernels for all devices do without; sm_120 and later have
# none of them.
_LIBRARY_CAPABILITIES = range(90, 120)
# There it costs less to unpack a weight once in memory for chunks of more rows than these, on sm_90 by the bits of a
# code, than to unpack it in every block. `most_chunk_rows` has an exception.
_MOST_WGMMA_ROWS, _MOST_LIBRARY_ROWS = {2: 1024, 4: 1024, 8: 512}, 128
# packed_gemm_wgmma.cu: up to so many sums, tiles times rows, a block has registers for codes of every kind.
_MOST_SUMS = 8 * 128
_FEWEST_STAGES = 3
# packed_gemm.cu: the tiles of a block from which on no two warps share one. packed_gemm_wide.cu: threads of a tile.
_UNSHARED_TILES, _WIDE_TILE_THREADS = 16, 16
# packed_gemm_wgmma.cu: bytes of the barriers of a stage, columns of a tensor map's box, and the tiles of a block from
# which on it has no warp that only copies.
_BARRIER_BYTES, _BOX_COLUMNS, _COPYING_TILES = 16, 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConstants(LayoutConstants):
    """Compile-time constants of every packed_gemm*.cu, which explain them."""

    tiles: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpGemmConstants(ChunkConstants):
    """Compile-time constants of packed_gemm.cu."""

    tile_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedConstants(ChunkConstants):
    """Compile-time constants of packed_gemm_wide.cu, which can compute the activation of an mlp too."""

    gated: bool | None = None
    fatrelu: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaConstants(GatedConstants):
    """Compile-time constants of packed_gemm_wgmma.cu."""

    tokens: int


PACKED_GEMM = KernelSpec(
    "packed_gemm", "linear_packed/packed_gemm.cu", "project_residual", WarpGemmConstants, hot=True
)
PACKED_GEMM_WIDE = KernelSpec(
    "packed_gemm_wide", "linear_packed/packed_gemm_wide.cu", "project_residual", GatedConstants, hot=True
)
PACKED_GEMM_WGMMA = KernelSpec(
    "packed_gemm_wgmma", "linear_packed/packed_gemm_wgmma.cu", "project_residual", WgmmaConstants, hot=True,
    arch="sm_90",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A block of a kernel: it multiplies `rows` rows of x with `tiles` tiles of the weight.

    `time`: what it takes alone on a multiprocessor of an H200 with 4,096 columns of symmetric codes of 4 bits, us.
    `most_stages`: the most that it asks for.
    """

    kernel: KernelSpec
    tiles: int
    rows: int
    time: float
    most_stages: int


BLOCKS = (
    Block(PACKED_GEMM, 4, 64, 22.5, most_stages=6),
    Block(PACKED_GEMM, 8, 64, 37.5, most_stages=6),
    Block(PACKED_GEMM, 16, 64, 59.5, most_stages=6),
    Block(PACKED_GEMM_WIDE, 8, 128, 51.0, most_stages=4),
    Block(PACKED_GEMM_WIDE, 16, 128, 79.0, most_stages=4),
)
# They take all of the shared memory: a second block on the same multiprocessor would make both slower.
WGMMA_BLOCKS = tuple(
    Block(PACKED_GEMM_WGMMA, tiles, rows, time, most_stages=sys.maxsize)
    for tiles, rows, time in (
        (4, 64, 13.6), (8, 64, 19.3), (16, 64, 36.0), (4, 128, 16.5), (8, 128, 25.6), (12, 128, 36.0), (16, 128, 47.0),
    )
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


def most_chunk_rows(layout: PackedLayout, device: Device) -> int:
    """Return the most rows of a chunk for which a weight is unpacked in registers."""
    if device.capability == _WGMMA_CAPABILITY:
        # A kernel that also computes the activation behind gate_up saves as much as unpacking costs again and again.
        saves = layout.product == "gate_up" and layout.bits <= 4 and layout.zeros != MINIMUMS
        return sys.maxsize if saves else _MOST_WGMMA_ROWS[layout.bits]
    return _MOST_LIBRARY_ROWS if device.capability in _LIBRARY_CAPABILITIES else sys.maxsize


def plan_chunk(layout: PackedLayout, num_rows: int, device: Device) -> ChunkPlan | None:
    """Plan the product of `num_rows` rows with a weight; None where the weight is unpacked in memory."""
    if num_rows > most_chunk_rows(layout, device):
        return None

    def time(block: Block) -> float:
        blocks = ceil(layout.num_tiles / block.tiles) * ceil(num_rows / block.rows)
        return ceil(blocks / device.num_sms) * block.time

    return plan_block(min(blocks_for(layout, device), key=time), layout, num_rows, device)


def blocks_for(layout: PackedLayout, device: Device) -> list[Block]:
    """Return the blocks that a device has room for, of kernels that take the weight."""
    blocks = WGMMA_BLOCKS if device.capability == _WGMMA_CAPABILITY else BLOCKS
    return [block for block in blocks if _takes(block, layout, device)]


def plan_block(block: Block, layout: PackedLayout, num_rows: int, device: Device) -> ChunkPlan:
    """Plan the product of `num_rows` rows with a weight in blocks of this kind."""
    tiles, tile_blocks, row_blocks = block.tiles, ceil(layout.num_tiles / block.tiles), ceil(num_rows / block.rows)
    stages = min(block.most_stages, device.shared_bytes_per_block // _stage_bytes(block, layout))
    shared_bytes = stages * _stage_bytes(block, layout)
    if block.kernel is PACKED_GEMM_WIDE:
        wide = GatedConstants(**layout.sizes, tiles=tiles, stages=stages)
        return ChunkPlan(block.kernel, wide, row_blocks * tile_blocks, _WIDE_TILE_THREADS * tiles, shared_bytes)
    if block.kernel is PACKED_GEMM_WGMMA:
        constants = WgmmaConstants(**layout.sizes, tiles=tiles, stages=stages, tokens=block.rows)
        threads = 32 * tiles if tiles >= _COPYING_TILES else 32 * tiles + 32
        return ChunkPlan(block.kernel, constants, (row_blocks, tile_blocks), threads, shared_bytes, block.rows)
    tile_warps = 1 if tiles >= _UNSHARED_TILES else 2
    shared = WarpGemmConstants(**layout.sizes, tiles=tiles, stages=stages, tile_warps=tile_warps)
    return ChunkPlan(block.kernel, shared, (tile_blocks, row_blocks), 32 * tiles * tile_warps, shared_bytes)


def _takes(block: Block, layout: PackedLayout, device: Device) -> bool:
    if block.kernel is PACKED_GEMM_WGMMA and block.tiles * block.rows > _MOST_SUMS and _is_demanding(block, layout):
        return False
    return _FEWEST_STAGES * _stage_bytes(block, layout) <= device.shared_bytes_per_block


def _is_demanding(block: Block, layout: PackedLayout) -> bool:
    """Tell whether codes of this kind would spill registers beside more than `_MOST_SUMS` sums, as ptxas reports."""
    has_many_zeros = layout.zeros == MINIMUMS or bool(layout.zeros and layout.scale_group == SCALE_GROUPS[0])
    return has_many_zeros or (layout.bits == 8 and block.tiles == 12)


def _stage_bytes(block: Block, layout: PackedLayout) -> int:
    """Return the bytes of x and w in shared memory for a slice, for half a slice in packed_gemm_wide.cu."""
    if block.kernel is PACKED_GEMM_WIDE:
        group_bytes = (layout.unit_bytes - layout.code_bytes) // (SLICE_COLUMNS // layout.scale_group)
        scales = max(1, SLICE_COLUMNS // 2 // layout.scale_group) * group_bytes
        return block.rows * SLICE_COLUMNS + block.tiles * (layout.code_bytes // 2 + scales)
    barriers = _BARRIER_BYTES if block.kernel is PACKED_GEMM_WGMMA else 0
    return block.rows * SLICE_COLUMNS * 2 + block.tiles * layout.unit_bytes + barriers
