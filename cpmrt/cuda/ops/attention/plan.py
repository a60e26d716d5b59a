"""Launch shapes of the attention kernels: splits, clusters, shared memory and workspace, from the model and device.

Nothing here depends on the rows of a step, so that a row's result does not either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from cpmrt.config import ModelConfig
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import PAGE_SIZE, pages_for

_HEADS = ("HEAD_DIM", "GROUP")


def _spec(name: str, op: str, *constants: str, arch: str = "") -> KernelSpec:
    return KernelSpec(name, f"attention/{name}.cu", op, (*_HEADS, *constants), hot=True, arch=arch)


DECODE_ATTENTION = _spec(
    "decode_attention", "decode_attention", "STAGES", "PORTABLE", "TREE", "WINDOW", "SELECTED", "FP8"
)
TREE_ATTENTION = _spec("tree_attention", "decode_attention", "STAGES", "ROW_TILES", "CLUSTER", "WINDOW", arch="sm_90")
SELECTED_ATTENTION = _spec("selected_attention", "decode_attention", "STAGES", "TREE", arch="sm_90")
PREFILL_ATTENTION = _spec("prefill_attention", "prefill_attention", "WINDOW")
PREFILL_WGMMA = _spec("prefill_attention_wgmma", "prefill_attention", "WINDOW", arch="sm_90")
PREFILL_SELECTED = _spec("prefill_selected_wgmma", "prefill_attention", arch="sm_90")

_QUERY_TILE = 16  # rows of an m16n8k16 tile
_PREFILL_TILE = 128
_PLAIN = {"TREE": 0, "WINDOW": 0, "SELECTED": 0, "FP8": 0}  # rows of no tree that see all their keys
# Tiles of query rows of a block of tree_attention, blocks of a cluster: what is faster if all groups of rows are there
# at once comes first. Then by size of a cluster of how many multiprocessors one finds room for a block on each (H200).
_TREE_BLOCKS = ((2, 8), (3, 8), (2, 4), (3, 4), (2, 2))
_SMS_OF_CLUSTER = {8: 8.8, 4: 4.4, 2: 2}
_FEWEST_SHARING_ROWS = 8
_MOST_CLUSTERS = 32  # whose partial results one block merges for a row
_HOPPER_SHARED_BYTES = 232448
_SMALL_SHARED_MEMORY = (86, 89, 120)  # compute capabilities with 100 KB of shared memory a multiprocessor


@dataclass(frozen=True)
class DecodeAttentionPlan:
    """How `decode_attention` is compiled and launched; `partials` (float32) and `arrivals` (int32) count elements.

    `units` are the blocks that share a run of pages: one for each 16 query heads of each KV head. If
    `has_own_kernels`, many rows of trees that see all keys are left to `tree_attention`, and rows that chose blocks to
    `selected_attention`, which have the same workspace.
    """

    constants: dict[str, int]
    num_splits: int
    units: int
    cluster: int
    resident_blocks: int
    threads: int
    shared_bytes: int
    partials: int
    arrivals: int
    has_own_kernels: bool

    def grid(self, rows: int) -> tuple[int, int, int]:
        """For a step of `rows` rows. It may depend on them: which block takes a run does not change the result."""
        clusters = self.resident_blocks // (self.units * rows * self.cluster)
        clusters = min(max(1, clusters), self.num_splits // self.cluster)
        return (self.cluster * clusters, self.units, 1) if rows == 1 else (self.cluster, self.units * rows, clusters)


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch of `kernel` for the rows of a step; `sizes`: its first integers."""

    kernel: KernelSpec
    constants: dict[str, int]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class PrefillAttentionPlan:
    """How `kernel` is compiled and launched: grid (blocks_per_tile, tiles(rows)).

    A tile has at most `rows_per_tile` rows. Where tiles share the rows evenly there are a multiple of `tiles_at_once`,
    so that the device has work to the end. With `box_columns` the kernel takes tensor maps of the pages, in boxes of a
    page's rows and so many columns.
    """

    kernel: KernelSpec
    constants: dict[str, int]
    blocks_per_tile: int
    rows_per_tile: int
    threads: int
    shared_bytes: int
    box_columns: int | None = None
    tiles_at_once: int = 1

    def tiles(self, rows: int) -> int:
        """Grid y for a bucket of `rows` rows."""
        return ceil(rows / (self.rows_per_tile * self.tiles_at_once)) * self.tiles_at_once


def decode_attention_of(
    config: ModelConfig,
    max_context: int,
    *,
    capability: int,
    num_sms: int,
    portable: bool = False,
    is_fp8: bool = False,
) -> DecodeAttentionPlan:
    """The plan of a model's attention in steps of any number of rows."""
    return plan_decode_attention(
        num_heads=config.attention.num_heads,
        num_kv_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        max_context=max_context,
        max_rows=MAX_ROWS,
        arch=capability,
        num_sms=num_sms,
        portable=portable,
        is_fp8=is_fp8,
    )


def plan_decode_attention(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    max_rows: int,
    arch: int,
    num_sms: int,
    portable: bool = False,
    is_fp8: bool = False,
) -> DecodeAttentionPlan:
    """arch: compute capability as 90; max_rows: the most rows of a step, at most 64; portable: without clusters;
    is_fp8: of pages in fp8, two of which take a place of the ring.

    One row alone should keep every multiprocessor reading: one run of pages for each. Clusters of 8 (sm_90 on) merge
    partial results without going through memory; without them one block merges all runs, which more than 32 make slower
    than they make the reading faster. A capacity of few pages needs few splits.
    """
    group = num_heads // num_kv_heads
    tiles = ceil(group / _QUERY_TILE)
    heads = ceil(group / tiles)
    units = num_kv_heads * tiles
    cluster = 8 if arch >= 90 and not portable else 1
    stages = 2 if arch in _SMALL_SHARED_MEMORY else 3
    wanted = min(num_sms // units, ceil(max_context / PAGE_SIZE), _MOST_CLUSTERS * cluster)
    num_splits = max(1, wanted // cluster) * cluster
    received = 5 * heads * head_dim if cluster > 1 else 0
    has_own_kernels = arch == 90 and not portable and not is_fp8
    kept_heads = _rows_of_heads(heads) if has_own_kernels else heads
    return DecodeAttentionPlan(
        constants={"HEAD_DIM": head_dim, "GROUP": group, "STAGES": stages, "PORTABLE": int(portable)}
        | _PLAIN
        | {"FP8": int(is_fp8)},
        num_splits=num_splits,
        units=units,
        cluster=cluster,
        resident_blocks=2 * num_sms,
        threads=128,
        shared_bytes=_QUERY_TILE * head_dim * 2 + stages * PAGE_SIZE * head_dim * 4 + received,
        partials=max_rows * units * (num_splits // cluster) * kept_heads * head_dim * 5 // 4,
        arrivals=max_rows * units * cluster,
        has_own_kernels=has_own_kernels,
    )


def _rows_of_heads(heads: int) -> int:
    """Of a tile of query rows that a row of a tree with so many heads takes: a half or all of them."""
    return _QUERY_TILE // 2 if heads <= _QUERY_TILE // 2 else _QUERY_TILE


def decode_launch(
    plan: DecodeAttentionPlan, rows: int, *, is_tree: bool, window: int = 0, selected: int = 0
) -> AttentionLaunch:
    """For so many rows: of trees or not; `selected` as the kernel's SELECTED."""
    if is_tree and not selected and plan.has_own_kernels and _share_pages(plan, rows):
        return _tree_launch(plan, rows, window)
    kind = {"TREE": int(is_tree), "WINDOW": window, "SELECTED": selected}
    one = AttentionLaunch(
        kernel=DECODE_ATTENTION,
        constants=plan.constants | kind,
        grid=plan.grid(rows),
        threads=plan.threads,
        shared_bytes=plan.shared_bytes,
        sizes=(plan.num_splits,),
    )
    if selected != 1 or not plan.has_own_kernels:
        return one
    # Only as many clusters as there is room for at once: one that came later would wait for all turns of another.
    clusters = min(max(1, _clusters_at_once(plan) // (plan.units * rows)), plan.num_splits // plan.cluster)
    constants = {name: one.constants[name] for name in ("HEAD_DIM", "GROUP", "STAGES", "TREE")}
    grid = (plan.cluster, plan.units * rows, clusters)
    return replace(one, kernel=SELECTED_ATTENTION, constants=constants, grid=grid)


def _clusters_at_once(plan: DecodeAttentionPlan) -> int:
    return int(plan.resident_blocks / _SMS_OF_CLUSTER[plan.cluster])


def _share_pages(plan: DecodeAttentionPlan, rows: int) -> bool:
    """Whether it pays: where a cluster for each row is there at once, it is faster alone."""
    return rows >= _FEWEST_SHARING_ROWS and rows * plan.units > _clusters_at_once(plan)


def _tree_launch(decode: DecodeAttentionPlan, rows: int, window: int) -> AttentionLaunch:
    """All groups at once, as far as they find room."""
    group, num_sms = decode.constants["GROUP"], decode.resident_blocks // 2
    tile_rows = _QUERY_TILE // _rows_of_heads(ceil(group / ceil(group / _QUERY_TILE)))
    for row_tiles, cluster in _TREE_BLOCKS:
        groups, resident = ceil(rows / (row_tiles * tile_rows)), int(num_sms / _SMS_OF_CLUSTER[cluster])
        if groups * decode.units <= resident:
            break
    # A row of many runs gives work to more clusters.
    most = min(groups * decode.num_splits // decode.cluster, resident // decode.units)
    constants = {name: decode.constants[name] for name in ("HEAD_DIM", "GROUP", "STAGES")}
    return AttentionLaunch(
        kernel=TREE_ATTENTION,
        constants=constants | {"ROW_TILES": row_tiles, "CLUSTER": cluster, "WINDOW": window},
        grid=(cluster, decode.units, max(groups, most)),
        threads=row_tiles * 128,
        shared_bytes=_tree_shared_bytes(decode, row_tiles, cluster),
        sizes=(rows, decode.num_splits),
    )


def _tree_shared_bytes(decode: DecodeAttentionPlan, row_tiles: int, cluster: int) -> int:
    """The ring; nodes and queries, or what slices exchange; what a block receives."""
    size, stages = decode.constants["HEAD_DIM"], decode.constants["STAGES"]
    page, query, exchange = 2 * PAGE_SIZE * size * 2, _QUERY_TILE * size * 2, 3 * _QUERY_TILE * size * 4
    received = decode.cluster * (_QUERY_TILE * size * 4 // cluster + _QUERY_TILE * 4)
    return stages * page + max(page + row_tiles * query, row_tiles * exchange) + row_tiles * received


def plan_selected_chunk(*, num_heads: int, num_kv_heads: int, head_dim: int, arch: int) -> DecodeAttentionPlan:
    """For rows of a prefill chunk over blocks that each chose for itself: many, so that a row's tile of heads is one
    block's, without a workspace."""
    units = num_kv_heads * ceil(num_heads // num_kv_heads / _QUERY_TILE)
    return plan_decode_attention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, max_context=PAGE_SIZE, max_rows=1, arch=arch,
        num_sms=units, portable=True,
    )  # fmt: skip


def plan_selected_tiles(
    *, num_heads: int, num_kv_heads: int, head_dim: int, num_selected: int, max_context: int, arch: int, num_sms: int
) -> PrefillAttentionPlan | None:
    """For the same rows where `prefill_selected_wgmma.cu` takes them: neighbours share the blocks that they read.

    None elsewhere: with fewer heads of a KV head more neighbours would have to choose alike.
    """
    group, heads = num_heads // num_kv_heads, _QUERY_TILE
    if arch != 90 or group % heads:
        return None
    warpgroups, tile_rows, stages = 3, 64, 5
    rows, warps = tile_rows // heads * warpgroups, 4 * (warpgroups + 1)
    ring_bytes, lists = stages * 4 * PAGE_SIZE * head_dim, 8 * rows * num_selected
    shared_bytes = warpgroups * tile_rows * head_dim * 2 + ring_bytes + 8 * (2 * stages + 2) + 4 * warps + lists
    if shared_bytes > _HOPPER_SHARED_BYTES or 4 * pages_for(max_context) > ring_bytes:
        return None
    return PrefillAttentionPlan(
        kernel=PREFILL_SELECTED,
        constants={"HEAD_DIM": head_dim, "GROUP": group},
        blocks_per_tile=num_heads // heads,
        rows_per_tile=rows,
        threads=32 * warps,
        shared_bytes=shared_bytes,
        box_columns=_box_columns(head_dim),
        tiles_at_once=max(1, num_sms * heads // num_heads),
    )


def plan_prefill_attention(*, num_heads: int, num_kv_heads: int, head_dim: int, arch: int) -> PrefillAttentionPlan:
    """arch: compute capability as 90. Heads of one KV head share a block where the group allows."""
    group = num_heads // num_kv_heads
    if arch == 90:
        return _plan_prefill_wgmma(num_heads, group, head_dim)
    heads = 2 if group % 2 == 0 else 1
    return PrefillAttentionPlan(
        kernel=PREFILL_ATTENTION,
        constants={"HEAD_DIM": head_dim, "GROUP": group, "WINDOW": 0},
        blocks_per_tile=num_heads // heads,
        rows_per_tile=_PREFILL_TILE // heads,
        threads=128,
        shared_bytes=(_PREFILL_TILE + 4 * PAGE_SIZE) * head_dim * 2,
    )


def _plan_prefill_wgmma(num_heads: int, group: int, head_dim: int) -> PrefillAttentionPlan:
    """The sizes that `prefill_attention_wgmma.cu` chooses: 64 rows a warpgroup, three stages of two pages."""
    warpgroups = 3 if head_dim == 64 else 2
    heads = warpgroups if group % warpgroups == 0 else 1
    tile_rows, stages = 64 * warpgroups, 3
    barriers = 4 * stages + 1
    return PrefillAttentionPlan(
        kernel=PREFILL_WGMMA,
        constants={"HEAD_DIM": head_dim, "GROUP": group, "WINDOW": 0},
        blocks_per_tile=num_heads // heads,
        rows_per_tile=tile_rows // heads,
        threads=(warpgroups + 1) * 128,
        shared_bytes=(tile_rows + stages * 4 * PAGE_SIZE) * head_dim * 2 + barriers * 8,
        box_columns=_box_columns(head_dim),
    )


def _box_columns(head_dim: int) -> int:
    """Elements of a row that lie together in shared memory."""
    return 32 if head_dim == 96 else 64
