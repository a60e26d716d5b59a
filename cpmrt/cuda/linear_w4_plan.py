"""How a skinny product with 4-bit weights (`kernels_cu/linear_w4.cu`) is packed, compiled and launched.

The packed layout fixes the order of a sum: it follows from the weight's shape and the device alone. The other constants
may follow from the number of rows (row invariance).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.cuda.linear_plan import MAX_ROWS, PRODUCTS, DeviceLimits
from cpmrt.cuda.packed_w4 import SLICE_COLUMNS, TILE_ROWS, PackedLayout, whole_lines
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
# From so many rows on they are normalised once, by prepare_w4, and not again in every block; and four warps multiply
# together.
_PREPARED_ROWS, _WARPGROUP_ROWS = 16, 32
# A block that reads more of x than this shares it out: it takes one run of K, and exchanges sums with others.
_LARGEST_WHOLE_X = 98_304
_MAX_SLOTS, _STAGES = 8, 4
# One of the stages of x, as a share of a block's memory.
_STAGE_SHARE = 0.08
# Bytes of weights on their way before x is asked for: it queues behind them. And at most, for one row.
_EARLY_BYTES, _SINGLE_ROW_RING = 70_000, 139_264


@dataclass(frozen=True)
class LinearW4Plan:
    """Compile-time constants of linear_w4.cu and its launch: `grid` blocks of `block` threads, dynamic shared bytes.

    `prepared`: x is what prepare_w4 wrote to a buffer of `prepared_bytes`, compiled with `prepare_constants`, in one
    block of `PREPARE_THREADS` a row. `partial_bytes`, `num_arrivals`: of the float32 and the zeroed int32 scratch that
    the kernel takes, 0 if it takes none.
    """

    constants: dict[str, int]
    grid: int
    block: int
    shared_bytes: int
    prepared: bool
    prepare_constants: dict[str, int]
    prepared_bytes: int
    partial_bytes: int
    num_arrivals: int


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
) -> PackedLayout:
    """The layout of a weight [out_features, in_features] (gate_up: both halves together) on a device.

    `group_size` is the file's: 32, 64, a multiple of 128, or in_features for one group a row. Raises
    UnsupportedModelError.
    """
    if in_features % SLICE_COLUMNS:
        raise UnsupportedModelError(
            f"a 4-bit {product} weight has a number of columns that the kernels do not take",
            expected=f"a multiple of {SLICE_COLUMNS}",
            actual=str(in_features),
            fix="use the unquantised checkpoint",
        )
    if group_size not in SCALE_GROUPS and (group_size < 1 or group_size % SLICE_COLUMNS):
        raise UnsupportedModelError(
            f"a 4-bit {product} weight has a group size that the kernels do not take",
            expected="32, 64, 128 or -1",
            actual=str(group_size),
            fix="use a checkpoint with another group size",
        )
    tiles = ceil(out_features / TILE_ROWS)
    whole_rows = product in ("gate_up", "head") and tiles >= _WHOLE_ROW_TILES * limits.num_sms
    # Blocks that exchange sums wait for each other: all must be on the device at once.
    runs = 1 if whole_rows or limits.num_sms < _RUNS else _RUNS
    return PackedLayout(product, out_features, in_features, runs, min(group_size, SLICE_COLUMNS), zeros, head_dim)


def plan_linear_w4(
    layout: PackedLayout, num_rows: int, limits: DeviceLimits, *, permuted: bool = False, portable: bool = False
) -> LinearW4Plan:
    """The plan of one product; `permuted` weights take their x from prepare_w4, which gathers it."""
    rows = row_bucket(num_rows)
    x_slice = SLICE_COLUMNS * 2 * rows + max(16, SLICE_COLUMNS // layout.scale_group * rows * 4)
    whole_x = layout.num_slices * x_slice
    shared_run = layout.runs == 1 or whole_x > min(_LARGEST_WHOLE_X, limits.shared_bytes // 2)
    copies = layout.runs if shared_run else 1
    clusters = max(1, limits.num_sms // copies)
    warps = _block_warps(layout.num_tiles, clusters, limits, shared_run)
    tiles = warps if shared_run else warps // layout.runs
    grid = copies * min(clusters, ceil(layout.num_tiles / tiles))
    ring = _Ring.of(layout, rows, warps, rounds=ceil(layout.num_tiles * copies / grid / tiles))

    barriers = whole_lines(warps * _MAX_SLOTS * 8 + _STAGES * 16)
    fixed = barriers + whole_lines((0 if shared_run else warps * 512) + whole_lines(rows * 36) + rows * 8)
    space = limits.shared_bytes - fixed
    x_bytes = (layout.run_slices if shared_run else layout.num_slices) * x_slice
    resident = not shared_run or x_bytes + min(ring.slots, 2) * ring.level <= space
    stages = _STAGES if limits.shared_bytes >= _LARGE_SHARED_BYTES else _STAGES - 1
    stage_slices = 0 if resident else _stage(int(limits.shared_bytes * _STAGE_SHARE) // x_slice, layout.run_slices)
    held = x_bytes if resident else stages * stage_slices * x_slice
    slots = max(1, min(ring.slots, (space - held) // ring.level))

    normalises = layout.product != "residual"
    sees_rows = not shared_run or layout.runs == 1
    prepared = permuted or not resident or (normalises and (rows >= _PREPARED_ROWS or not sees_rows))
    exchanges = shared_run and layout.runs > 1
    constants = layout.constants | {
        "LINEAR": PRODUCTS[layout.product],
        "ROWS": rows,
        "WARPS": warps,
        "SHARED_RUN": int(shared_run),
        "PREPARED": int(prepared),
        "STAGE_SLICES": stage_slices,
        "STAGES": stages,
        "EARLY_SLOTS": _EARLY_BYTES // ring.level,
        "WARPGROUPS": int(shared_run and rows >= _WARPGROUP_ROWS and not portable),
        "PORTABLE": int(portable),
        "SMEM_BYTES": fixed + held + slots * ring.level,
    }
    if layout.product == "qkv":
        constants["HEAD_DIM"] = layout.head_dim
    return LinearW4Plan(
        constants,
        grid,
        warps * 32,
        constants["SMEM_BYTES"],
        prepared,
        {name: constants[name] for name in ("IN_FEATURES", "ROWS", "SCALE_GROUP", "ZEROS", "WARPGROUPS")},
        whole_x if prepared else 0,
        layout.num_tiles * layout.runs * ceil(rows / 8) * 512 if exchanges else 0,
        layout.num_tiles if exchanges else 0,
    )


@dataclass(frozen=True)
class _Ring:
    """The weights in a block's shared memory: `slots` chunks a warp would do; `level` bytes for one of every warp."""

    slots: int
    level: int

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, warps: int, rounds: int) -> _Ring:
        aligned = next(slices for slices in (1, 2, 4) if slices * layout.unit_bytes % 128 == 0)
        together = 4 if rows <= 8 else 2 if rows == 16 else 1
        chunk_slices = min(max(aligned, together), layout.run_slices)
        level = warps * whole_lines(chunk_slices * layout.unit_bytes)
        slots = min(_MAX_SLOTS, rounds * ceil(layout.run_slices / chunk_slices))
        return cls(slots if rows > 1 else max(1, min(slots, _SINGLE_ROW_RING // level)), level)


def _block_warps(num_tiles: int, clusters: int, limits: DeviceLimits, shared_run: bool) -> int:
    """Warps of a block: those that leave the busiest one the fewest tiles, in the fewest rounds."""
    large = limits.shared_bytes >= _LARGE_SHARED_BYTES
    most = (_MOST_RUN_WARPS if shared_run else _MOST_WARPS) if large else _FEW_WARPS
    step, share = (_WARPGROUP, 1) if shared_run else (_RUNS, _RUNS)

    def busiest(warps: int) -> tuple[int, int]:
        tiles = warps // share
        rounds = ceil(num_tiles / (clusters * tiles))
        return rounds * tiles, rounds

    return min(range(_RUNS, most + 1, step), key=busiest)


def _stage(fitting: int, most: int) -> int:
    """Slices of a stage: even, or one."""
    return min(most, fitting // 2 * 2 or 1)
