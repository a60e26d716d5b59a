"""Divides a skinny product with packed weights among blocks and warps, and the shared memory of a block among them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import LARGE_SHARED_BYTES, STARTS_EARLY
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, RUNS, SLICE_COLUMNS, TILE_ROWS, PackedLayout, whole_lines
from cpmrt.cuda.ops.linear_packed.ring import MAX_SLOTS, Ring
from cpmrt.weights.ternary import TERNARY_BITS

ROW_BUCKETS = (1, 8, 16, 32, 64)
"""The most rows of a step that each build takes."""
SINGLE_ROW_SUMS = 64
"""Bytes after each slice of a single row: its quantum and sums, and padding that puts two slices in different banks."""
MOST_KEPT_ROUNDS = 4
"""The most rounds whose sums a product of one row keeps (KEPT_ROUNDS): so few that each thread finishes one output of
all of them."""
# The most warps of a block: where eight share a tile; where each has a tile; on devices with little shared memory.
_MOST_WARPS, _MOST_RUN_WARPS, _FEW_WARPS = 24, 20, 8
# On a device on which lanes copy, and a block has no more shared memory than this, twelve warps that each have a tile
# wait less than eight do, up to so many rows.
_SCARCE_SHARED_BYTES, _SCARCE_WARPS, _SCARCE_ROWS = 102_400, 12, 32
_WARPGROUP = 4
# From so many rows on four warps multiply together; in clusters, and in blocks of more than _WARPGROUP_WARPS warps,
# from the later number on.
_WARPGROUP_ROWS, _LATE_WARPGROUP_ROWS, _WARPGROUP_WARPS = 16, 32, 16
# Of x that blocks turn into integers themselves, a block keeps all only up to this share of its shared memory: one row,
# and several rows. Of more a block takes one run of K, and exchanges sums with others. So it does where several rows
# that come prepared have more than _MOST_PREPARED_X bytes, which the L2 would have to send to every block; and where
# there are many rows, but fewer than so many tiles a multiprocessor, so that the exchange takes few rounds.
_WHOLE_ROW_SHARE, _WHOLE_ROWS_SHARE, _MOST_PREPARED_X = 0.5, 0.4, 140_000
_MANY_ROWS, _MANY_ROWS_TILES = 64, 2
# Eight blocks exchange their sums inside a cluster where that is faster than through memory. Clusters leave a tenth of
# the multiprocessors without work: they pay for short runs of K, and where products take less time than the exchange.
# With 64 rows they pay where few warps a block, which have registers for so many sums, take all tiles, and normalise no
# more than a slice of the rows.
_CLUSTER_SLICES, _CLUSTER_ROWS, _CLUSTER_ROWS_WARPS = 8, 32, 8
# Stages of x, and the most bytes of one as a share of a block's shared memory: the warps of a block wait for each other
# at each stage, and the ring of weights needs room as well.
_STAGES, _STAGE_SHARE = 4, 0.1
# Slices of a small chunk of weights, taken where lanes copy and there would be no room for two chunks of each warp.
_SMALL_CHUNK = 2
# The most slices of a run with which the kept rounds of one row go side by side.
_JOINED_SLICES = 2
# Bytes of weights that a block asks for before x, which then queues behind them: more where eight warps share a tile,
# so that each has a chunk.
_EARLY_BYTES, _EARLY_SPLIT_BYTES = 70_000, 102_000
# Only half of the warps ask so early (EARLY_WARPS): in a product of one row with ternary weights if a chunk for each
# warp would be more bytes than this level; in a residual product in clusters, at this number of rows, if it would be
# more than _EARLY_BYTES.
_HALF_EARLY_LEVEL, _HALF_EARLY_ROWS = 65_536, 32
# The width of the models, and the bits of their weights, in which one row's products of the stream take pairs of tiles.
_PAIRS_WIDTH, _PAIRS_BITS = 2048, 4


def has_pairs(layout: PackedLayout, rows: int, device: Device) -> bool:
    """Whether each block takes two tiles side by side: of q, k and v, or of the output projection, of a row of a model
    2,048 wide.

    It then has half as many blocks, which find room sooner beside attention and the products around it. That was
    measured with MiniCPM5-2B in 4 bits; wider and narrower models have other numbers of tiles.
    """
    is_of_stream = layout.product == "qkv" or (layout.product == "residual" and layout.out_features == _PAIRS_WIDTH)
    has_size = layout.in_features == _PAIRS_WIDTH and layout.bits == _PAIRS_BITS and layout.runs == RUNS
    return rows == 1 and has_size and is_of_stream and device.capability >= STARTS_EARLY


@dataclass(frozen=True)
class Division:
    """The division of a weight's tiles and runs among `grid` blocks of `warps` warps, in `rounds` turns.

    With `shared_run` the warps of a block have different tiles of one run; the blocks of a tile then exchange sums
    (`exchanges`), or have none to exchange because K is one run. The ring is that of a block's weights, with chunks of
    `small_chunk` slices if that is not 0.
    """

    shared_run: bool
    in_clusters: bool
    exchanges: bool
    warps: int
    grid: int
    rounds: int
    kept_rounds: int
    ring: Ring
    small_chunk: int = 0

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, device: Device) -> Division:
        can_cluster = _can_cluster(layout, rows, device)
        find_room = can_cluster and layout.num_tiles <= device.whole_clusters * _MOST_RUN_WARPS
        shared_run = layout.runs == 1 or (rows > 1 and find_room) or not _keeps_whole_x(layout, rows, device)
        copies = layout.runs if shared_run else 1
        exchanges = shared_run and layout.runs > 1
        in_clusters = exchanges and can_cluster
        groups = device.whole_clusters if in_clusters else max(1, device.num_sms // copies)
        takes_pairs = has_pairs(layout, rows, device)
        warps = RUNS if takes_pairs else _block_warps(layout.num_tiles, groups, rows, device, shared_run)
        tiles = warps if shared_run else warps // layout.runs
        of_block = 1 if in_clusters else 2 if takes_pairs else tiles
        grid = copies * min(groups, ceil(layout.num_tiles / of_block))
        rounds = ceil(layout.num_tiles * copies / grid / tiles)
        kept = rounds if rows == 1 and not shared_run and rounds <= MOST_KEPT_ROUNDS else 1
        ring = Ring.of(layout, rows, warps, rounds)
        is_small = _wants_small_chunks(layout, rows, device, shared_run, ring)
        small_chunk = _SMALL_CHUNK if is_small else 0
        ring = Ring.of(layout, rows, warps, rounds, small_chunk=small_chunk)
        return cls(shared_run, in_clusters, exchanges, warps, grid, rounds, kept, ring, small_chunk)

    def early_slots(self, layout: PackedLayout, rows: int, device: Device) -> int:
        """Return how many chunks of a warp are copied before x is asked for."""
        if device.capability < STARTS_EARLY:
            return 0
        if self.is_early_by_half(layout, rows):
            return 1
        if self.kept_rounds > 1 and layout.run_slices <= _JOINED_SLICES:
            return self.ring.slots
        return (_EARLY_BYTES if self.shared_run else _EARLY_SPLIT_BYTES) // self.ring.level

    def is_early_by_half(self, layout: PackedLayout, rows: int) -> bool:
        """Whether only half of the warps of a product of several rows copy chunks so early."""
        is_late = self.in_clusters and rows == _HALF_EARLY_ROWS and self.ring.level > _EARLY_BYTES
        return is_late and layout.product == "residual"

    @property
    def early_warps(self) -> int:
        """The warps of a block that copy early chunks: so few that the first chunks arrive soon and work can begin."""
        return self.warps // 2 if self.ring.level > _HALF_EARLY_LEVEL else self.warps

    @property
    def shares_runs(self) -> bool:
        """Whether several warps of a block read the same run of x, and not all of them."""
        return not self.shared_run and self.warps > RUNS

    def multiplies_together(self, rows: int, layout: PackedLayout) -> bool:
        """Whether four warps share a tensor core product. In clusters, and where many warps have few registers each,
        they do so only from more rows on, and not with the most rows if minimums take some of those registers."""
        late = self.in_clusters or self.warps > _WARPGROUP_WARPS
        if late and layout.zeros == MINIMUMS and rows == ROW_BUCKETS[-1]:
            return False
        return self.shared_run and rows >= (_LATE_WARPGROUP_ROWS if late else _WARPGROUP_ROWS)

    def has_whole_slices(self, layout: PackedLayout) -> bool:
        """Whether each block of a gate_up product writes one slice of its rows, 8 columns a tile, in a single round."""
        is_even = self.warps * TILE_ROWS // 2 == SLICE_COLUMNS and self.grid * self.warps == layout.num_tiles
        return layout.product == "gate_up" and self.shared_run and layout.runs == 1 and is_even


@dataclass(frozen=True)
class BlockMemory:
    """A block's shared memory: x whole (`stage_slices` 0) or in stages, the ring of weights, sums that peers send."""

    nbytes: int
    stage_slices: int
    received_apart: bool

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, device: Device, division: Division, *, is_fed: bool) -> BlockMemory:
        x_slice, ring, warps = x_slice_bytes(layout, rows), division.ring, division.warps
        received = ceil(warps / layout.runs) * layout.runs * ceil(rows / 8) * 512 if division.in_clusters else 0
        fixed = _fixed_bytes(rows, warps, division.kept_rounds, division.shared_run)
        fixed += received if division.rounds > 1 else 0
        space = device.shared_bytes_per_block - fixed
        held = (layout.run_slices if division.shared_run else layout.num_slices) * x_slice
        # With rows that the product before prepared, a block begins with the first stage.
        starts_early = is_fed and division.exchanges and not division.in_clusters
        fits = not starts_early and held + min(ring.slots, 2) * ring.level <= space
        stage_slices = 0 if fits or not division.shared_run else _stage_slices(layout, x_slice, device)
        if stage_slices:
            held = num_stages(device) * stage_slices * x_slice
        used = held + max(1, min(ring.slots, (space - held) // ring.level)) * ring.level
        # Sums from peers have memory of their own if another round needs that of weights and x, or if there is room.
        apart = division.in_clusters and (division.rounds > 1 or used + received <= space)
        own = received if apart and division.rounds == 1 else 0
        return cls(fixed + own + max(used, 0 if apart else received), stage_slices, apart)


def x_slice_bytes(layout: PackedLayout, rows: int) -> int:
    """Return the bytes of a slice of x with its quanta, and with its sums if codes have zero points or minimums."""
    groups = SLICE_COLUMNS // layout.scale_group if layout.zeros else 0
    return SLICE_COLUMNS * 2 * rows + (SINGLE_ROW_SUMS if rows == 1 else (groups + 1) * rows * 4)


def x_bytes(layout: PackedLayout, rows: int) -> int:
    """Return the bytes of all slices of x."""
    return layout.num_slices * x_slice_bytes(layout, rows)


def num_stages(device: Device) -> int:
    """Return the number of stages of x in shared memory, where it is not there whole."""
    return _STAGES if device.shared_bytes_per_block >= LARGE_SHARED_BYTES else _STAGES - 1


def _stage_slices(layout: PackedLayout, x_slice: int, device: Device) -> int:
    """Return the slices of a stage of x, a power of two, or all of a run."""
    fitting = max(1, int(device.shared_bytes_per_block * _STAGE_SHARE) // x_slice)
    return min(layout.run_slices, 1 << fitting.bit_length() - 1)


def _wants_small_chunks(layout: PackedLayout, rows: int, device: Device, shared_run: bool, ring: Ring) -> bool:
    """Whether a block has no room for x, or the stages of several rows, and two chunks of each warp."""
    if device.capability >= STARTS_EARLY or (rows == 1 and layout.bits == TERNARY_BITS):
        return False
    x_slice, shared = x_slice_bytes(layout, rows), device.shared_bytes_per_block
    held = layout.run_slices * x_slice if shared_run else x_bytes(layout, rows)
    if rows > 1 and shared_run:
        held = min(held, num_stages(device) * _stage_slices(layout, x_slice, device) * x_slice)
    return (rows == 1 or shared_run) and held + 2 * ring.level > shared


def _can_cluster(layout: PackedLayout, rows: int, device: Device) -> bool:
    if rows > _CLUSTER_ROWS:
        are_few = layout.num_tiles <= device.whole_clusters * _CLUSTER_ROWS_WARPS
        if not are_few or (layout.product != "residual" and layout.run_slices > 1):
            return False
    return device.whole_clusters > 0 and layout.run_slices <= _CLUSTER_SLICES


def _keeps_whole_x(layout: PackedLayout, rows: int, device: Device) -> bool:
    """Whether each block keeps all of x in shared memory, where K has several runs and clusters do not share them.

    Several rows of other products than "residual" come prepared, unless they have no norm. All of x leaves room for a
    chunk of each warp.
    """
    shared, whole = device.shared_bytes_per_block, x_bytes(layout, rows)
    if rows == 1 or layout.product == "residual":
        most = int((_WHOLE_ROW_SHARE if rows == 1 else _WHOLE_ROWS_SHARE) * shared)
    elif rows >= _MANY_ROWS and layout.num_tiles < _MANY_ROWS_TILES * device.num_sms:
        return False
    else:
        most = _MOST_PREPARED_X
    warps = _block_warps(layout.num_tiles, device.num_sms, rows, device, shared_run=False)
    rounds = ceil(layout.num_tiles / (device.num_sms * (warps // RUNS)))
    kept = rounds if rows == 1 and rounds <= MOST_KEPT_ROUNDS else 1
    small_chunk = _SMALL_CHUNK if rows == 1 and device.capability < STARTS_EARLY else 0
    level = Ring.of(layout, rows, warps, rounds, small_chunk=small_chunk).level
    return whole <= most and whole + level + _fixed_bytes(rows, warps, kept, shared_run=False) <= shared


def _fixed_bytes(rows: int, warps: int, kept_rounds: int, shared_run: bool) -> int:
    """Return the bytes of a block's barriers, of the sums of warps that share a tile, and of what finishes rows."""
    barriers = whole_lines(warps * MAX_SLOTS * 8 + _STAGES * 16 + 16)
    partial = 0 if shared_run else kept_rounds * warps * 512
    return barriers + whole_lines(partial + whole_lines(rows * 36) + rows * 8)


def _block_warps(num_tiles: int, groups: int, rows: int, device: Device, shared_run: bool) -> int:
    """Return the warps of a block with which the busiest block has the fewest tiles, in the fewest rounds; twelve where
    shared memory is scarce, and eight warps would have several tiles each."""
    large = device.shared_bytes_per_block >= LARGE_SHARED_BYTES
    is_scarce = device.shared_bytes_per_block <= _SCARCE_SHARED_BYTES and device.capability < STARTS_EARLY
    if is_scarce and shared_run and 1 < rows <= _SCARCE_ROWS and num_tiles > _FEW_WARPS * groups:
        return _SCARCE_WARPS
    most = (_MOST_RUN_WARPS if shared_run else _MOST_WARPS) if large else _FEW_WARPS
    step, share = (_WARPGROUP, 1) if shared_run else (RUNS, RUNS)

    def busiest(warps: int) -> tuple[int, int]:
        tiles = warps // share
        rounds = ceil(num_tiles / (groups * tiles))
        return rounds * tiles, rounds

    return min(range(RUNS, most + 1, step), key=busiest)
