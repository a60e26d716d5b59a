"""How a skinny matrix product of `linear/linear.cu` is compiled and launched: constants, grid and shared memory.

`CLUSTER` fixes the order of a sum, so it is chosen by the shape of the weight and the device alone; the other constants
may follow from the number of rows (row invariance).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.device import Device

PRODUCTS = {"qkv": 0, "residual": 1, "gate_up": 2, "head": 3}
OPS = {"qkv": "qkv", "residual": "project_residual", "gate_up": "gate_up", "head": "lm_head"}
_CONSTANTS = (
    *("LINEAR", "IN_FEATURES", "TOKEN_TILES", "HALF_TILE", "GROUP", "CLUSTER", "SPLIT_WARPS", "NORM", "SMEM_BYTES"),
)
LINEAR = {
    product: KernelSpec(
        f"linear_{product}",
        "linear/linear.cu",
        op,
        (*_CONSTANTS, "HEAD_DIM") if product == "qkv" else _CONSTANTS,
        hot=True,
    )
    for product, op in OPS.items()
}
BLOCK_THREADS = 256
MAX_ROWS = 64
_WARPS = 8
_UNIT_COLUMNS = 64
_CHUNK_BYTES = 2048
_LARGE_SHARED_BYTES = 200_000
# Two tiles of tokens of which the second is half empty leave more shared memory to the weights.
_HALF_TILE_ROWS = 12
_MAX_GROUP = {1: 5, 2: 5, 4: 5, 8: 2}
_SMALL_MAX_GROUP = {1: 4, 2: 4, 4: 3, 8: 1}
# Two blocks that share a tile exchange their sums, which costs about a microsecond: the busiest multiprocessor must
# read that much less.
_CLUSTER_GAIN = 0.9
# From so many rows on it pays that x passes once for eight times the tiles, at the price of a second set of sums.
_ROW_SPLIT_TOKEN_TILES = 8
_ROW_SPLIT_TILES_PER_SM = 12


@dataclass(frozen=True)
class DeviceLimits:
    """What the plan needs to know of a device; `clusters` is false below sm_90 and for the portable path.

    `whole_clusters`: clusters of eight blocks that can run at once, a block to a multiprocessor (0: no clusters).
    """

    num_sms: int
    shared_bytes: int
    clusters: bool
    whole_clusters: int = 0

    @classmethod
    def of(cls, device: Device) -> DeviceLimits:
        has_clusters = device.capability >= 90
        return cls(device.num_sms, device.shared_bytes_per_block, has_clusters, device.whole_clusters)


@dataclass(frozen=True)
class LinearPlan:
    """Compile-time constants of linear.cu, and its launch: blocks of `BLOCK_THREADS` threads, dynamic shared bytes."""

    constants: dict[str, int]
    grid: int
    shared_bytes: int


def token_tiles(num_rows: int) -> int:
    """Tiles of 8 tokens of the kernel that takes `num_rows` rows (1 to 64)."""
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"num_rows must be 1 to {MAX_ROWS}, got {num_rows}")
    return next(tiles for tiles in (1, 2, 4, 8) if 8 * tiles >= num_rows)


def plan_linear(
    product: str, out_features: int, in_features: int, num_rows: int, limits: DeviceLimits, *, has_norm: bool = True
) -> LinearPlan:
    """The plan of one product with a weight [out_features, in_features] (gate_up: both halves together).

    `has_norm` False: rows enter the product as they are, as those of "residual" always do.
    """
    tiles = token_tiles(num_rows)
    half_tile = int(tiles == 2 and num_rows <= _HALF_TILE_ROWS)
    num_weight_tiles = ceil(out_features / 16)
    cluster = _cluster(num_weight_tiles, limits)
    num_clusters = limits.num_sms // cluster
    units = ceil(in_features / _UNIT_COLUMNS)
    row_split = (
        product in ("gate_up", "head")
        and tiles >= _ROW_SPLIT_TOKEN_TILES
        and num_weight_tiles >= _ROW_SPLIT_TILES_PER_SM * limits.num_sms
        and cluster == 1
        and units % _WARPS == 0
        and in_features >= 2048
        and limits.shared_bytes >= _LARGE_SHARED_BYTES
    )
    split_warps = 1 if row_split else _WARPS
    row_warps = _WARPS // split_warps

    def rounds(group: int) -> int:
        return ceil(ceil(num_weight_tiles / (group * row_warps)) / num_clusters)

    large = limits.shared_bytes >= _LARGE_SHARED_BYTES
    max_group = (_MAX_GROUP if large else _SMALL_MAX_GROUP)[tiles]
    # Rows that the busiest block reads: of the weight, and of x once a round.
    group = min(range(max_group, 0, -1), key=lambda group: rounds(group) * (16 * group * row_warps + 8 * tiles))
    num_groups = ceil(num_weight_tiles / (group * row_warps))
    own_units = ceil(units / (_WARPS * cluster))
    constants = {
        "LINEAR": PRODUCTS[product],
        "IN_FEATURES": in_features,
        "TOKEN_TILES": tiles,
        "HALF_TILE": half_tile,
        "GROUP": group,
        "CLUSTER": cluster,
        "SPLIT_WARPS": split_warps,
        "NORM": int(has_norm and product != "residual"),
    }
    # A block whose whole stream fits asks for no more, so that the next kernels' blocks fit beside it and prefetch.
    stream = _WARPS * rounds(group) * group * own_units * row_warps * _CHUNK_BYTES
    activations = _WARPS * own_units * (tiles * 1024 - half_tile * 512)
    sums = _WARPS * group * (512 + 256 * tiles)
    small = _WARPS * own_units * 128 + _WARPS * cluster * tiles * 32 + tiles * 128
    constants["SMEM_BYTES"] = min(limits.shared_bytes, stream + activations + sums + small)
    return LinearPlan(constants, cluster * min(num_groups, num_clusters), constants["SMEM_BYTES"])


def _cluster(num_weight_tiles: int, limits: DeviceLimits) -> int:
    """Blocks that share a tile: 2 where halves of tiles spread more evenly over the multiprocessors."""

    def busiest(cluster: int) -> float:
        return ceil(num_weight_tiles / (limits.num_sms // cluster)) / cluster

    if not limits.clusters or num_weight_tiles <= limits.num_sms:
        return 1
    return 2 if busiest(2) < _CLUSTER_GAIN * busiest(1) else 1
