"""Attention over chosen blocks: `selected_attention` for the rows of a step, and the rows of a prefill chunk.

Rows of a chunk go together with their neighbours, which share the blocks that they read (`prefill_selected_wgmma`), or
each alone (`decode_attention`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from cpmrt.config import SparseConfig
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import QUERY_TILE, HeadConstants, Operands
from cpmrt.cuda.ops.attention.decode import AttentionLaunch, AttentionScratch, DecodePlan, attend_rows
from cpmrt.cuda.ops.attention.prefill import PrefillPlan, box_columns
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.ops import Selection


@dataclass(frozen=True)
class SelectedConstants(HeadConstants):
    """Compile-time constants of selected_attention.cu. `stages` of the ring of pages; `tree`: rows of draft trees;
    `paired`: clusters of sixteen blocks."""

    stages: int
    tree: bool
    paired: bool


SELECTED_ATTENTION = KernelSpec(
    "selected_attention", "attention/selected_attention.cu", "decode_attention", SelectedConstants, hot=True,
    arch="sm_90", has_wide_clusters=lambda sizes: bool(sizes["PAIRED"]),
)  # fmt: skip
PREFILL_SELECTED = KernelSpec(
    "prefill_selected_wgmma", "attention/prefill_selected_wgmma.cu", "prefill_attention", HeadConstants, hot=True,
    arch="sm_90",
)  # fmt: skip
DENSE_ROWS = KernelSpec("dense_rows", "attention/dense_rows.cu", "prefill_attention")
_HOPPER_SHARED_BYTES = 232448
_MOST_GRID_ROWS = 65535
_STAGES_OF_ONE = 6
"""Pages in the ring of a single row: all of a run, where a row chooses 96 blocks."""


def selected_launch(plan: DecodePlan, rows: int, *, is_tree: bool) -> AttentionLaunch:
    """Return the launch of `selected_attention`, in as many clusters as find room at once: a further cluster would have
    to wait until another has taken all its turns. A single row has pairs of clusters where the device has clusters of
    sixteen blocks, and a longer ring: its blocks are too few to share multiprocessors."""
    of_model, is_paired = plan.constants, rows == 1 and plan.device.has_wide_clusters
    width, stages = (2, _STAGES_OF_ONE) if is_paired else (1, of_model.stages)
    clusters = min(max(1, plan.clusters_at_once // (plan.units * rows)), plan.num_splits // plan.cluster)
    return replace(
        plan.launch(rows, replace(of_model, selected=1, stages=stages)),
        kernel=SELECTED_ATTENTION,
        constants=SelectedConstants(of_model.head_dim, of_model.group, stages, is_tree, is_paired),
        grid=(width * plan.cluster, plan.units * rows, ceil(clusters / width)),
        takes_local=True,
    )


@dataclass(frozen=True)
class SelectedChunkPlan:
    """The plan of a chunk's attention to chosen blocks: each row alone (`single`), or neighbours together (`tiled`;
    None: never) in chunks of at least `fewest_tiled` rows, two thirds of the rows that the device takes at once."""

    single: DecodePlan
    tiled: PrefillPlan | None
    fewest_tiled: int

    @classmethod
    def of(cls, shape: GroupedAttention, device: Device, max_context: int) -> SelectedChunkPlan:
        """Plan for this device; `shape.sparse` must not be None."""
        tiled = plan_tiles(shape, device, max_context)
        fewest = 2 * device.num_sms * tiled.rows_per_tile // (3 * tiled.blocks_per_tile) if tiled else 0
        return cls(DecodePlan.of_single_rows(shape, device), tiled, fewest)


def plan_tiles(shape: GroupedAttention, device: Device, max_context: int) -> PrefillPlan | None:
    """Plan `prefill_selected_wgmma`; None where the device, shape or context does not suit it.

    With fewer than 16 query heads of a KV head a tile would have more rows, which would have to choose the same blocks.
    """
    assert shape.sparse is not None, "planned without sparse attention"
    head_dim, group, heads = shape.head_dim, shape.num_heads // shape.num_kv_heads, QUERY_TILE
    if device.capability != 90 or group % heads:
        return None
    warpgroups, tile_rows, stages = 3, 64, 5
    rows, warps = tile_rows // heads * warpgroups, 4 * (warpgroups + 1)
    ring_bytes, lists = stages * 4 * PAGE_SIZE * head_dim, 8 * rows * shape.sparse.num_selected
    shared_bytes = warpgroups * tile_rows * head_dim * 2 + ring_bytes + 8 * (2 * stages + 2) + 4 * warps + lists
    if shared_bytes > _HOPPER_SHARED_BYTES or 4 * pages_for(max_context) > ring_bytes:
        return None
    return PrefillPlan(
        kernel=PREFILL_SELECTED,
        heads=HeadConstants(head_dim, group),
        blocks_per_tile=shape.num_heads // heads,
        rows_per_tile=rows,
        threads=32 * warps,
        shared_bytes=shared_bytes,
        box_columns=box_columns(head_dim),
        tiles_at_once=max(1, device.num_sms * heads // shape.num_heads),
    )


def attend_selected_chunk(
    launch: Launcher, plan: SelectedChunkPlan, given: Operands, chunk: DeviceArray, selection: Selection
) -> None:
    """Launch attention of the chunk's rows that choose blocks, over 16-bit pages; outputs of others are left alone."""
    tiled, num_rows, sparse = plan.tiled, len(given.q), selection.config
    if tiled is not None and num_rows >= plan.fewest_tiled:
        launch(
            tiled.kernel, tiled.heads, tiled.grid(num_rows), tiled.threads,
            given.out, given.q, *tiled.pages(launch, given.kv), given.rows.block_tables, chunk, selection.blocks,
            *given.sizes, np.int32(sparse.num_selected), np.int32(sparse.dense_context), smem=tiled.shared_bytes,
        )  # fmt: skip
        return
    step = _MOST_GRID_ROWS // plan.single.units
    for first in range(0, num_rows, step):
        part = replace(given, selection=selection).part(slice(first, first + step))
        attend_rows(launch, plan.single.launch(len(part.q), plan.single.constants), AttentionScratch(), part)


def dense_rows(launch: Launcher, dense_chunk: DeviceArray, chunk: DeviceArray, sparse: SparseConfig) -> None:
    """Store in `dense_chunk` the part of `chunk` (both slot, start, count) whose rows look at all keys."""
    launch(DENSE_ROWS, {}, 1, 1, dense_chunk, chunk, np.int32(sparse.dense_context))
