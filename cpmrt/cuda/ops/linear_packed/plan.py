"""How a skinny product with weights in 4 or 8 bits (`linear_packed/linear_packed.cu`) is packed, compiled and launched.

The packed layout fixes the order of a sum: it follows from the weight's shape and the device alone. The other constants
may follow from the number of rows (row invariance).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.cuda.ops.linear import MAX_ROWS, PRODUCTS, DeviceLimits
from cpmrt.cuda.ops.linear_packed.layout import SLICE_COLUMNS, TILE_ROWS, PackedLayout, whole_lines
from cpmrt.errors import UnsupportedModelError

PREPARE_THREADS = 256
ROW_BUCKETS = (1, 8, 16, 32, 64)
SCALE_GROUPS = (32, 64, 128)
_RUNS = 8
# From so many tiles a multiprocessor on a warp takes whole rows.
_WHOLE_ROW_TILES = 8
_LARGE_SHARED_BYTES = 200_000
# Warps of a block at most: where eight share a tile; where each has a tile; on devices with little memory.
_MOST_WARPS, _MOST_RUN_WARPS, _FEW_WARPS = 24, 20, 8
_WARPGROUP = 4
# From so many rows on they are normalised once, by prepare_rows, and not again in every block; a gate_up product whose
# blocks have whole slices of the rows that it writes spares the next product prepare_rows; and four warps multiply
# together, but in clusters or among more warps only from more rows on.
_PREPARED_ROWS, _FEEDING_ROWS, _WARPGROUP_ROWS, _LATE_WARPGROUP_ROWS, _WARPGROUP_WARPS = 16, 16, 16, 32, 16
# A block that reads more of x than this shares it out: it takes one run of K, and exchanges sums with others.
_LARGEST_WHOLE_X = 98_304
# Rounds whose sums one row keeps (KEPT_ROUNDS): so few that a thread finishes one output of all of them.
_MAX_SLOTS, _STAGES, _MOST_KEPT_ROUNDS = 8, 4, 4
# Eight blocks exchange their sums inside a cluster where that is faster than through memory. Clusters leave a tenth of
# the multiprocessors without work: it pays for short runs of K, and where products take less time than the exchange.
_CLUSTER_ROWS, _CLUSTER_SLICES = 32, 8
# One of the stages of x, as a share of a block's memory.
_STAGE_SHARE = 0.08
# Bytes of weights on their way before x is asked for, which queues behind them: more where eight warps share a tile, so
# that each has a chunk; none before eight rows that every block normalises. And at most for one row.
_EARLY_BYTES, _EARLY_SPLIT_BYTES, _SINGLE_ROW_RING = 70_000, 102_000, 139_264
_LATE_WEIGHTS_ROWS = 8
# When the next kernel may start (TRIGGER). At 64 rows that is prepare_rows, whose blocks take registers from the next.
_AT_ONCE, _AT_END, _LATE_TRIGGER_ROWS = 0, 1, 64
# Up to this share of a multiprocessor's shared memory for one row, blocks of a whole layer find room beside each other:
# one of each kernel, since a grid of as many blocks as multiprocessors asks for so much that no two of it share one.
_SMALL_SHARE, _OVER_HALF_BYTES = 4, 1024
# Chunks of whole lines copy faster; in 8 bits they are so large that many rows, or many warps, leave room for one only.
_LINE_BYTES, _LARGE_CHUNK_ROWS, _LARGE_CHUNK_WARPS = 128, 16, 16


@dataclass(frozen=True)
class LinearW4Plan:
    """Compile-time sizes of linear_packed.cu and its launch: `grid` blocks of `block` threads, dynamic shared bytes.

    `prepared`: x is what prepare_rows wrote to a buffer of `prepared_bytes`, compiled with `prepare_constants`, in one
    block of `PREPARE_THREADS` a row. `fed_constants`, unless None: the kernel also writes to a buffer of `fed_bytes`
    what prepare_rows, compiled with these, would make of its output without a norm or permutation. `partial_bytes`,
    `num_arrivals`: of the float32 and the zeroed int32 scratch that the kernel takes, 0 if it takes none.
    `prefers_shared`: as `launch` takes it, the same for any number of rows.
    """

    constants: dict[str, int]
    grid: int
    block: int
    shared_bytes: int
    prepared: bool
    prepare_constants: dict[str, int]
    prepared_bytes: int
    fed_constants: dict[str, int] | None
    fed_bytes: int
    partial_bytes: int
    num_arrivals: int
    prefers_shared: bool


def row_bucket(num_rows: int) -> int:
    """Rows of the build that takes `num_rows` rows (1 to 64)."""
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"num_rows must be 1 to {MAX_ROWS}, got {num_rows}")
    return next(bucket for bucket in ROW_BUCKETS if bucket >= num_rows)


def packed_layout(
    product: str,
    out_features: int,
    in_features: int,
    group_size: int,
    limits: DeviceLimits,
    *,
    zeros: bool,
    head_dim: int = 0,
    bits: int = 4,
) -> PackedLayout:
    """The layout of a weight [out_features, in_features] (gate_up: both halves together) on a device.

    `group_size` is the file's: 32, 64, a multiple of 128, or in_features for one group a row. Raises
    UnsupportedModelError.
    """
    if in_features % SLICE_COLUMNS:
        raise UnsupportedModelError(
            f"a {bits}-bit {product} weight has a number of columns that the kernels do not take",
            expected=f"a multiple of {SLICE_COLUMNS}", actual=str(in_features), fix="use the unquantised checkpoint",
        )  # fmt: skip
    if group_size not in SCALE_GROUPS and (group_size < 1 or group_size % SLICE_COLUMNS):
        raise UnsupportedModelError(
            f"a {bits}-bit {product} weight has a group size that the kernels do not take",
            expected="32, 64, 128 or -1", actual=str(group_size), fix="use a checkpoint with another group size",
        )  # fmt: skip
    tiles = ceil(out_features / TILE_ROWS)
    whole_rows = product in ("gate_up", "head") and tiles >= _WHOLE_ROW_TILES * limits.num_sms
    # Blocks that exchange sums wait for each other: all must be on the device at once.
    runs = 1 if whole_rows or limits.num_sms < _RUNS else _RUNS
    return PackedLayout(product, out_features, in_features, runs, min(group_size, SLICE_COLUMNS), zeros, head_dim, bits)


def plan_linear_w4(
    layout: PackedLayout,
    num_rows: int,
    limits: DeviceLimits,
    *,
    permuted: bool = False,
    portable: bool = False,
    has_norm: bool = True,
    is_fed: bool = False,
) -> LinearW4Plan:
    """The plan of one product; `permuted` weights take their x from prepare_rows, which gathers it.

    `has_norm` False: rows enter the product as they are, as those of "residual" always do. `is_fed`: a gate_up product
    has prepared them.
    """
    rows = row_bucket(num_rows)
    work = _Work.of(layout, rows, limits)
    memory = _Memory.of(layout, rows, limits, work, is_fed=is_fed)
    normalises = has_norm and layout.product != "residual"
    from_memory = rows >= _PREPARED_ROWS or work.exchanges
    prepared = permuted or is_fed or memory.stage_slices > 0 or (normalises and not work.in_clusters and from_memory)
    feeds = rows >= _FEEDING_ROWS and work.has_whole_slices(layout)
    constants = layout.constants | {
        "LINEAR": PRODUCTS[layout.product],
        "ROWS": rows,
        "WARPS": work.warps,
        "SHARED_RUN": int(work.shared_run),
        "CLUSTERS": int(work.in_clusters),
        "RECEIVED_APART": int(memory.received_apart),
        "NORM": int(normalises),
        "PREPARED": int(prepared),
        "STAGE_SLICES": memory.stage_slices,
        "STAGES": _stages(limits),
        "FEEDS": int(feeds),
        "TRIGGER": _AT_END if layout.product == "residual" and rows >= _LATE_TRIGGER_ROWS else _AT_ONCE,
        "KEPT_ROUNDS": work.kept_rounds,
        "EARLY_SLOTS": work.early_slots(rows, whole_rows=layout.runs == 1 and normalises and not prepared),
        "WARPGROUPS": int(work.multiplies_together(rows) and not portable),
        "PORTABLE": int(portable),
        "SMEM_BYTES": memory.nbytes,
    }
    if layout.product == "qkv":
        constants["HEAD_DIM"] = layout.head_dim
    own = {name: constants[name] for name in ("IN_FEATURES", "ROWS", "SCALE_GROUP", "ZEROS", "WARPGROUPS")}
    inner, through_memory = layout.out_features // 2, work.exchanges and not work.in_clusters
    is_small, fills = _is_small(layout, limits), rows == 1 and work.grid == limits.num_sms
    return LinearW4Plan(
        constants,
        work.grid,
        work.warps * 32,
        limits.shared_bytes // 2 + _OVER_HALF_BYTES if is_small and fills else memory.nbytes,
        prepared,
        own,
        layout.num_slices * _x_slice(layout, rows) + (4 * rows if normalises else 0) if prepared else 0,
        own | {"IN_FEATURES": inner} if feeds else None,
        inner // SLICE_COLUMNS * _x_slice(layout, rows) if feeds else 0,
        layout.num_tiles * layout.runs * ceil(rows / 8) * 512 if through_memory else 0,
        layout.num_tiles if through_memory else 0,
        is_small,
    )


def _is_small(layout: PackedLayout, limits: DeviceLimits) -> bool:
    one_row = _Memory.of(layout, 1, limits, _Work.of(layout, 1, limits), is_fed=False)
    return one_row.nbytes * _SMALL_SHARE <= limits.shared_bytes


@dataclass(frozen=True)
class _Work:
    """How the tiles and runs of a weight are shared out among blocks and warps, in `rounds` turns."""

    shared_run: bool
    in_clusters: bool
    exchanges: bool
    warps: int
    grid: int
    rounds: int
    kept_rounds: int
    ring: _Ring

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, limits: DeviceLimits) -> _Work:
        whole_x = layout.num_slices * _x_slice(layout, rows)
        shared_run = layout.runs == 1 or whole_x > min(_LARGEST_WHOLE_X, limits.shared_bytes // 2)
        copies = layout.runs if shared_run else 1
        exchanges = shared_run and layout.runs > 1
        in_clusters = exchanges and limits.whole_clusters > 0
        in_clusters = in_clusters and rows <= _CLUSTER_ROWS and layout.run_slices <= _CLUSTER_SLICES
        groups = limits.whole_clusters if in_clusters else max(1, limits.num_sms // copies)
        warps = _block_warps(layout.num_tiles, groups, limits, shared_run)
        tiles = warps if shared_run else warps // layout.runs
        grid = copies * min(groups, layout.num_tiles if in_clusters else ceil(layout.num_tiles / tiles))
        rounds = ceil(layout.num_tiles * copies / grid / tiles)
        kept = rounds if rows == 1 and not shared_run and rounds <= _MOST_KEPT_ROUNDS else 1
        return cls(shared_run, in_clusters, exchanges, warps, grid, rounds, kept, _Ring.of(layout, rows, warps, rounds))

    def early_slots(self, rows: int, *, whole_rows: bool) -> int:
        """Chunks of a warp that are copied before x is asked for; `whole_rows`: each block normalises all of x."""
        if self.shared_run and whole_rows and rows == _LATE_WEIGHTS_ROWS:
            return 0
        return (_EARLY_BYTES if self.shared_run else _EARLY_SPLIT_BYTES) // self.ring.level

    def multiplies_together(self, rows: int) -> bool:
        """Whether four warps share a tensor core product; not of few rows where many warps leave each few registers."""
        late = self.in_clusters or self.warps > _WARPGROUP_WARPS
        return self.shared_run and rows >= (_LATE_WARPGROUP_ROWS if late else _WARPGROUP_ROWS)

    def has_whole_slices(self, layout: PackedLayout) -> bool:
        """Whether each block makes a slice of the rows that a gate_up product writes, 8 columns a tile, and is done."""
        is_even = self.warps * TILE_ROWS // 2 == SLICE_COLUMNS and self.grid * self.warps == layout.num_tiles
        return layout.product == "gate_up" and self.shared_run and layout.runs == 1 and is_even


@dataclass(frozen=True)
class _Memory:
    """A block's shared memory: x whole (`stage_slices` 0) or in stages, the ring of weights, what peers send."""

    nbytes: int
    stage_slices: int
    received_apart: bool

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, limits: DeviceLimits, work: _Work, *, is_fed: bool) -> _Memory:
        x_slice, ring, warps = _x_slice(layout, rows), work.ring, work.warps
        barriers = whole_lines(warps * _MAX_SLOTS * 8 + _STAGES * 16 + 16)
        received = ceil(warps / layout.runs) * layout.runs * ceil(rows / 8) * 512 if work.in_clusters else 0
        partial = 0 if work.shared_run else work.kept_rounds * warps * 512
        finishing = whole_lines(partial + whole_lines(rows * 36) + rows * 8)
        fixed = barriers + finishing + (received if work.rounds > 1 else 0)
        space = limits.shared_bytes - fixed
        x_bytes = (layout.run_slices if work.shared_run else layout.num_slices) * x_slice
        starts_early = is_fed and work.exchanges and not work.in_clusters  # with the first of rows that lie there
        resident = not work.shared_run or (not starts_early and x_bytes + min(ring.slots, 2) * ring.level <= space)
        fitting = int(limits.shared_bytes * _STAGE_SHARE) // x_slice  # a stage has an even number of slices, or one
        stage_slices = 0 if resident else min(layout.run_slices, fitting // 2 * 2 or 1)
        held = x_bytes if resident else _stages(limits) * stage_slices * x_slice
        used = held + max(1, min(ring.slots, (space - held) // ring.level)) * ring.level
        # What peers send lies apart from weights and x if another round needs those, or if there is room.
        apart = work.in_clusters and (work.rounds > 1 or used + received <= space)
        own = received if apart and work.rounds == 1 else 0
        return cls(fixed + own + max(used, 0 if apart else received), stage_slices, apart)


def _x_slice(layout: PackedLayout, rows: int) -> int:
    """Bytes of a slice of x, with its sums."""
    return SLICE_COLUMNS * 2 * rows + max(16, SLICE_COLUMNS // layout.scale_group * rows * 4)


def _stages(limits: DeviceLimits) -> int:
    return _STAGES if limits.shared_bytes >= _LARGE_SHARED_BYTES else _STAGES - 1


@dataclass(frozen=True)
class _Ring:
    """The weights in a block's shared memory: `slots` chunks a warp would do; `level` bytes for one of every warp."""

    slots: int
    level: int

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, warps: int, rounds: int) -> _Ring:
        are_small = layout.bits == 8 and (rows > _LARGE_CHUNK_ROWS or warps > _LARGE_CHUNK_WARPS)
        copied = _LINE_BYTES // 2 if are_small else _LINE_BYTES
        aligned = next(slices for slices in (1, 2, 4) if slices * layout.unit_bytes % copied == 0)
        together = 2 if rows == 16 or layout.bits == 8 else 4 if rows <= 8 else 1
        chunk_slices = min(max(aligned, together), layout.run_slices)
        level = warps * whole_lines(chunk_slices * layout.unit_bytes)
        slots = min(_MAX_SLOTS, rounds * ceil(layout.run_slices / chunk_slices))
        return cls(slots if rows > 1 else max(1, min(slots, _SINGLE_ROW_RING // level)), level)


def _block_warps(num_tiles: int, groups: int, limits: DeviceLimits, shared_run: bool) -> int:
    """Warps of a block: those that leave the busiest one the fewest tiles, in the fewest rounds."""
    large = limits.shared_bytes >= _LARGE_SHARED_BYTES
    most = (_MOST_RUN_WARPS if shared_run else _MOST_WARPS) if large else _FEW_WARPS
    step, share = (_WARPGROUP, 1) if shared_run else (_RUNS, _RUNS)

    def busiest(warps: int) -> tuple[int, int]:
        tiles = warps // share
        rounds = ceil(num_tiles / (groups * tiles))
        return rounds * tiles, rounds

    return min(range(_RUNS, most + 1, step), key=busiest)
