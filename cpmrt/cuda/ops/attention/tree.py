"""Attention of many rows of draft trees that see all keys: `tree_attention`, where rows share the pages they read."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.ops.attention import QUERY_TILE, HeadConstants
from cpmrt.cuda.ops.attention.decode import SMS_OF_CLUSTER, AttentionLaunch, DecodePlan
from cpmrt.memory.caches import PAGE_SIZE


@dataclass(frozen=True)
class TreeConstants(HeadConstants):
    """Compile-time constants of tree_attention.cu: `stages` of the ring of pages, tiles of query rows of a block,
    blocks of a cluster, `window` in keys (0: all), `fp8` pages."""

    stages: int
    row_tiles: int
    cluster: int
    window: int
    fp8: bool | None = None


TREE_ATTENTION = KernelSpec(
    "tree_attention", "attention/tree_attention.cu", "decode_attention", TreeConstants, hot=True, arch="sm_90"
)
_FEWEST_ROWS = 8
# (Tiles of query rows of a block, blocks of a cluster), the fastest first if all groups of rows find room at once.
_BLOCKS = ((2, 8), (3, 8), (2, 4), (3, 4), (2, 2))


def shares_pages(plan: DecodePlan, rows: int) -> bool:
    """Return whether rows of trees are faster together: not if a cluster for each row finds room at once."""
    return plan.has_tree_kernel and rows >= _FEWEST_ROWS and rows * plan.units > plan.clusters_at_once


def tree_launch(plan: DecodePlan, rows: int, window: int) -> AttentionLaunch:
    """Return the launch of `tree_attention`, sized so that all groups of rows find room at once if they can."""
    head_dim, group, stages = plan.constants.head_dim, plan.constants.group, plan.constants.stages
    # Three tiles of rows over codes would spill registers.
    for row_tiles, cluster in (block for block in _BLOCKS if block[0] == 2 or not plan.constants.fp8):
        groups = ceil(rows / (row_tiles * (QUERY_TILE // plan.tree_heads)))
        resident = int(plan.device.num_sms / SMS_OF_CLUSTER[cluster])
        if groups * plan.units <= resident:
            break
    # Where a row has many runs, there is work for more clusters than there are groups.
    most = min(groups * plan.num_splits // plan.cluster, resident // plan.units)
    # Shared memory: the ring; then nodes and queries, or results that slices exchange; then results from other blocks.
    page, query, exchange = 2 * PAGE_SIZE * head_dim * 2, QUERY_TILE * head_dim * 2, 3 * QUERY_TILE * head_dim * 4
    received = plan.cluster * (QUERY_TILE * head_dim * 4 // cluster + QUERY_TILE * 4)
    return AttentionLaunch(
        kernel=TREE_ATTENTION,
        constants=TreeConstants(head_dim, group, stages, row_tiles, cluster, window, plan.constants.fp8 or None),
        grid=(cluster, plan.units, max(groups, most)),
        threads=row_tiles * 128,
        shared_bytes=stages * page + max(page + row_tiles * query, row_tiles * exchange) + row_tiles * received,
        sizes=(rows, plan.num_splits),
    )
