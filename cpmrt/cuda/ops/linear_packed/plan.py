"""Plans a skinny product with packed weights: how `linear_packed/linear_packed.cu` is compiled and launched.

The packed layout fixes the order of a sum, so it depends on the weight's shape and the device alone (row invariance).
The other constants may depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import LARGE_SHARED_BYTES, STARTS_EARLY, row_bucket
from cpmrt.cuda.ops.linear_packed.constants import LatentQueriesConstants, LinearPackedConstants, PrepareConstants
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, RUNS, SLICE_COLUMNS, TILE_ROWS, PackedLayout, whole_lines
from cpmrt.cuda.ops.linear_packed.pairs import has_pairs
from cpmrt.cuda.ops.linear_packed.ring import MAX_SLOTS, Ring
from cpmrt.weights.ternary import TERNARY_BITS

SINGLE_ROW_SUMS = 64
"""Bytes after each slice of a single row: its quantum and sums, and padding that puts two slices in different banks."""
ROW_BUCKETS = (1, 8, 16, 32, 64)
# The most warps of a block: where eight share a tile; where each has a tile; on devices with little shared memory.
_MOST_WARPS, _MOST_RUN_WARPS, _FEW_WARPS = 24, 20, 8
_HEAD_WARPS = 16  # of a block that makes a head of the queries of latent attention
_WARPGROUP = 4
# From so many rows on prepare_rows normalises them once, instead of every block; where they have more than
# _LARGEST_NORMALISED_X bytes it always does.
_PREPARED_ROWS = 16
# From so many rows on a gate_up product whose blocks write whole slices of its rows spares the next one prepare_rows.
_FEEDING_ROWS = 8
# From so many rows on four warps multiply together; in clusters, and in blocks of more than _WARPGROUP_WARPS warps,
# from the later number on.
_WARPGROUP_ROWS, _LATE_WARPGROUP_ROWS, _WARPGROUP_WARPS = 16, 32, 16
# Where all of x has more bytes than this, a block takes one run of K only and exchanges sums with others. The limit is
# lower for up to 8 rows (more were not measured) where all tiles find room in clusters: each of their blocks then turns
# only an eighth of x into integers.
_LARGEST_WHOLE_X, _LARGEST_NORMALISED_X, _SHARED_ROWS = 98_304, 61_440, 8
# Stages of x; the most rounds whose sums a product of one row keeps (KEPT_ROUNDS), so few that each thread finishes one
# output of all of them; and the most slices of a run with which these rounds go side by side.
_STAGES, _MOST_KEPT_ROUNDS, _JOINED_SLICES = 4, 4, 2
# Eight blocks exchange their sums inside a cluster where that is faster than through memory. Clusters leave a tenth of
# the multiprocessors without work: they pay for short runs of K, and where products take less time than the exchange.
_CLUSTER_ROWS, _CLUSTER_SLICES = 32, 8
_STAGE_SHARE = 0.08  # the most bytes of a stage of x, as a share of a block's shared memory
# Bytes of weights that a block asks for before x, which then queues behind them: more where eight warps share a tile,
# so that each has a chunk; none with eight rows that every block normalises, and none on devices below STARTS_EARLY.
_EARLY_BYTES, _EARLY_SPLIT_BYTES = 70_000, 102_000
_LATE_WEIGHTS_ROWS = 8
# Only half of the warps ask so early (EARLY_WARPS): in a product of one row with ternary weights if a chunk for each
# warp would be more bytes than this level; in a residual product in clusters, at this number of rows, if it would be
# more than _EARLY_BYTES.
_HALF_EARLY_LEVEL, _HALF_EARLY_ROWS = 65_536, 32
# When the next kernel may start (TRIGGER). At 64 rows the one after a residual product is prepare_rows, whose blocks
# take registers from the product after it. Outside of clusters, x of _ROWS_BEFORE_NEXT rows would queue behind the
# early reads of the next kernel.
_AT_ONCE, _AT_END, _BEHIND_X, _BEFORE_WAIT, _LATE_TRIGGER_ROWS = 0, 1, 2, 3, 64
_ROWS_BEFORE_NEXT = {"residual": 32, "gate_up": 32}
# In models up to this width all products ask for as much shared memory as a multiprocessor has, in wider ones none. A
# multiprocessor changes its split of shared memory and L1 only while it is idle, so a block that wants another split
# than its neighbours starts late.
_NARROW_WIDTH = 2048
# Weights in so many bits begin to come to the L2 during the product before theirs, a chunk for each warp: at these
# numbers of rows, in narrow models only at one row. Other numbers gain nothing, other bits were not measured.
_AHEAD_BITS, _AHEAD_ROWS = 4, (1, 32)
_LATENT_QUERIES = 4  # the number LINEAR of the product that makes queries of latent attention


@dataclass(frozen=True)
class PackedPlan:
    """The plan of one product: `grid` blocks of `block` threads, each block with `shared_bytes` of shared memory.

    `prefers_shared` is the same for any number of rows, and for all products of a model. With `constants.prepared` the
    kernel reads its rows from a buffer of `prepared_bytes`, which `PREPARE` writes with one block of `PREPARE_THREADS`
    threads a row.
    """

    layout: PackedLayout
    constants: LinearPackedConstants
    grid: int
    block: int
    shared_bytes: int
    prefers_shared: bool

    @property
    def prepare(self) -> PrepareConstants:
        """The constants of the kernel that prepares the rows."""
        own = self.constants
        return PrepareConstants(
            own.in_features, own.rows, own.scale_group, own.zeros, own.warpgroups, own.row_pitch
        )  # fmt: skip

    @property
    def prepared_bytes(self) -> int:
        own = self.constants
        sums = 4 * own.rows if own.norm else 0
        return _x_bytes(self.layout, own.rows) + sums if own.prepared else 0

    @property
    def fed(self) -> PrepareConstants | None:
        """The constants with which `PREPARE`, without a norm, would write what the kernel also writes for the next
        product, to a buffer of `fed_bytes`. None if the kernel writes its output only."""
        return replace(self.prepare, in_features=self._fed_columns) if self.constants.feeds else None

    @property
    def fed_bytes(self) -> int:
        slices = self._fed_columns // SLICE_COLUMNS
        return slices * _x_slice(self.layout, self.constants.rows) if self.constants.feeds else 0

    @property
    def _fed_columns(self) -> int:
        return self.layout.out_features // 2

    @property
    def first_read(self) -> tuple[int, int, int] | None:
        """The part of the weight that its warps read first, which the product before may bring to the L2: the number of
        pieces, the bytes from one to the next, and the bytes of each. None unless that pays: only weights in 4 bits
        whose warps take whole rows have one."""
        own, layout = self.constants, self.layout
        pays = own.rows in _AHEAD_ROWS and (own.rows == 1 or _width(layout) > _NARROW_WIDTH)
        if not pays or layout.runs > 1 or layout.bits != _AHEAD_BITS:
            return None
        chunk = Ring.of(layout, own.rows, own.warps, 1).level // own.warps
        return layout.num_tiles, layout.tile_bytes, min(chunk, layout.tile_bytes)

    @property
    def partial_bytes(self) -> int:
        """Bytes of the float32 sums that blocks exchange through memory."""
        return self.num_arrivals * self.layout.runs * ceil(self.constants.rows / 8) * 512

    @property
    def num_arrivals(self) -> int:
        """The number of int32 counters for the exchange of sums, which are zero before and after a launch."""
        exchanges = self.constants.shared_run and self.layout.runs > 1
        return self.layout.num_tiles if exchanges and not self.constants.clusters else 0


def plan_packed(
    layout: PackedLayout,
    num_rows: int,
    device: Device,
    *,
    permuted: bool = False,
    has_norm: bool = True,
    is_fed: bool = False,
    row_pitch: int | None = None,
    starts_next: bool = False,
) -> PackedPlan:
    """Plan one product; `permuted` weights take their rows from `PREPARE`, which gathers the columns.

    `has_norm` False: rows enter the product as they are, as those of "residual" always do. `is_fed`: the product before
    has prepared the rows. `row_pitch`: the columns of the rows, where they are more than the product takes.
    `starts_next`: as in `StepProduct`; the product does so only where that pays.
    """
    rows = row_bucket(num_rows, ROW_BUCKETS)
    work = _Work.of(layout, rows, device)
    memory = _Memory.of(layout, rows, device, work, is_fed=is_fed)
    normalises = has_norm and layout.product != "residual"
    are_large = rows >= _PREPARED_ROWS or _x_bytes(layout, rows) > _LARGEST_NORMALISED_X
    from_memory = normalises and not work.in_clusters and (are_large or work.exchanges)
    constants = _constants(
        layout, rows, device, work, memory,
        normalises=normalises, prepared=permuted or is_fed or memory.stage_slices > 0 or from_memory,
        row_pitch=row_pitch, starts_next=starts_next and layout.product == "qkv" and has_pairs(layout, rows, device),
    )  # fmt: skip
    # One row with a block for each multiprocessor asks for so much shared memory that no two blocks share one. So does
    # a product behind which attention waits already: it would wait 0.5 us longer for two that did.
    fills = rows == 1 and work.grid == device.num_sms
    alone = device.lone_block_bytes if fills or constants.trigger == _BEFORE_WAIT else 0
    shared_bytes, is_narrow = max(memory.nbytes, alone), _width(layout) <= _NARROW_WIDTH
    return PackedPlan(layout, constants, work.grid, work.warps * 32, shared_bytes, is_narrow)


def latent_queries(
    plan: PackedPlan, *, kv_rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> LatentQueriesConstants:
    """Return the constants of a product with this plan that makes queries of latent attention of its output."""
    return plan.constants.extended(
        LatentQueriesConstants, linear=_LATENT_QUERIES, head_dim=None,
        kv_rank=kv_rank, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim,
    )  # fmt: skip


def plan_heads(layout: PackedLayout, num_heads: int, device: Device, row_pitch: int) -> PackedPlan | None:
    """Plan a product of one normalised row in which each block makes one head; None where that does not fit."""
    tiles, at_once = layout.num_tiles // num_heads, _HEAD_WARPS // RUNS
    rounds = ceil(tiles / at_once)
    is_large = device.shared_bytes_per_block >= LARGE_SHARED_BYTES
    fits = layout.runs == RUNS and layout.run_slices == 1 and rounds * at_once == tiles and rounds <= _MOST_KEPT_ROUNDS
    if layout.out_features != num_heads * tiles * TILE_ROWS or not fits or not is_large:
        return None
    ring = Ring.of(layout, 1, _HEAD_WARPS, rounds)
    work = _Work(False, False, False, _HEAD_WARPS, num_heads, rounds, rounds, ring)
    return _plan_row(layout, device, work, row_pitch)


def plan_kv_heads(layout: PackedLayout, num_kv_heads: int, device: Device) -> PackedPlan | None:
    """Plan the product "qkv" of one normalised row in which eight blocks make all outputs that a KV head needs, with
    room for the weights of all their rounds at once; None where that does not fit."""
    rounds, rest = divmod(layout.num_tiles, num_kv_heads * RUNS)
    rounds += rest > 0
    if layout.runs != RUNS or layout.run_slices > 1 or rounds > MAX_SLOTS:
        return None
    ring = Ring.of(layout, 1, RUNS, rounds)
    if ring.slots < rounds:
        return None
    return _plan_row(layout, device, _Work(False, False, False, RUNS, num_kv_heads * RUNS, rounds, 1, ring))


def plan_columns(layout: PackedLayout, num_blocks: int, device: Device) -> PackedPlan | None:
    """Plan the product "gate_up" of one normalised row in which each of `num_blocks` blocks makes neighbouring columns,
    with eight warps and room for all its weights at once; None where that does not fit."""
    rounds, rest = divmod(layout.num_tiles, num_blocks)
    if rest or layout.runs != RUNS or layout.run_slices > 1 or not 0 < rounds <= _MOST_KEPT_ROUNDS:
        return None
    ring = Ring.of(layout, 1, RUNS, rounds)
    work = _Work(False, False, False, RUNS, num_blocks, rounds, rounds, ring)
    return _plan_row(layout, device, work) if ring.slots == rounds else None


def _plan_row(layout: PackedLayout, device: Device, work: _Work, row_pitch: int | None = None) -> PackedPlan:
    memory = _Memory.of(layout, 1, device, work, is_fed=False)
    constants = _constants(
        layout, 1, device, work, memory, normalises=True, prepared=False, row_pitch=row_pitch
    )  # fmt: skip
    return PackedPlan(layout, constants, work.grid, work.warps * 32, memory.nbytes, prefers_shared=True)


def _constants(
    layout: PackedLayout, rows: int, device: Device, work: _Work, memory: _Memory,
    *, normalises: bool, prepared: bool, row_pitch: int | None, starts_next: bool = False,
) -> LinearPackedConstants:
    # Ternary weights come so fast that the first warps should begin soon: EARLY_WARPS and OWN_RUNS. One row's products
    # in 4 bits wait for memory, and lose by both; qkv also waits for the row's place and was not measured with them.
    is_ternary_row = rows == 1 and layout.bits == TERNARY_BITS and layout.product != "qkv"
    shares_runs = layout.product == "residual" and not prepared and work.shares_runs
    is_late = work.in_clusters and rows == _HALF_EARLY_ROWS and work.ring.level > _EARLY_BYTES
    is_early_by_half = is_late and layout.product == "residual"
    return LinearPackedConstants(
        **layout.sizes, rows=rows, norm=normalises, prepared=prepared, portable=device.is_portable,
        warps=work.warps, shared_run=work.shared_run, clusters=work.in_clusters, kept_rounds=work.kept_rounds,
        warpgroups=work.multiplies_together(rows, layout) and not device.is_portable,
        feeds=rows >= _FEEDING_ROWS and work.has_whole_slices(layout),
        early_slots=0 if device.capability < STARTS_EARLY else 1 if is_early_by_half else work.early_slots(
            layout, rows, whole_rows=layout.runs == 1 and normalises and not prepared
        ),
        small_chunks=work.small_chunks or None,
        tile_copies=(normalises and not prepared and work.ring.copies_tiles(layout, work.kept_rounds, device)) or None,
        early_warps=work.warps // 2 if is_early_by_half else work.early_warps if is_ternary_row else None,
        own_runs=True if is_ternary_row and shares_runs else None,
        received_apart=memory.received_apart, stage_slices=memory.stage_slices, stages=_stages(device),
        smem_bytes=memory.nbytes, row_pitch=row_pitch,
        trigger=_BEFORE_WAIT if starts_next else _trigger(layout, rows, work),
    )  # fmt: skip


def _trigger(layout: PackedLayout, rows: int, work: _Work) -> int:
    product = layout.product
    if product == "residual" and rows >= _LATE_TRIGGER_ROWS:
        return _AT_END
    is_wide = layout.runs == 1 if product == "gate_up" else work.exchanges and not work.in_clusters
    return _BEHIND_X if is_wide and _ROWS_BEFORE_NEXT.get(product) == rows else _AT_ONCE  # others were not measured


def _width(layout: PackedLayout) -> int:
    """Return the columns of the residual stream, which a product reads or adds to."""
    return layout.out_features if layout.product == "residual" else layout.in_features


@dataclass(frozen=True)
class _Work:
    """The division of a weight's tiles and runs among blocks and warps, in `rounds` turns."""

    shared_run: bool
    in_clusters: bool
    exchanges: bool
    warps: int
    grid: int
    rounds: int
    kept_rounds: int
    ring: Ring
    small_chunks: bool = False

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, device: Device) -> _Work:
        whole_x, can_cluster = _x_bytes(layout, rows), device.whole_clusters > 0
        can_cluster = can_cluster and rows <= _CLUSTER_ROWS and layout.run_slices <= _CLUSTER_SLICES
        find_room = can_cluster and layout.num_tiles <= device.whole_clusters * _MOST_RUN_WARPS
        largest = _LARGEST_NORMALISED_X if find_room and rows <= _SHARED_ROWS else _LARGEST_WHOLE_X
        shared_run = layout.runs == 1 or whole_x > min(largest, device.shared_bytes_per_block // 2)
        copies = layout.runs if shared_run else 1
        exchanges = shared_run and layout.runs > 1
        in_clusters = exchanges and can_cluster
        groups = device.whole_clusters if in_clusters else max(1, device.num_sms // copies)
        takes_pairs = has_pairs(layout, rows, device)
        warps = RUNS if takes_pairs else _block_warps(layout.num_tiles, groups, device, shared_run)
        tiles = warps if shared_run else warps // layout.runs
        of_block = 1 if in_clusters else 2 if takes_pairs else tiles
        grid = copies * min(groups, ceil(layout.num_tiles / of_block))
        rounds = ceil(layout.num_tiles * copies / grid / tiles)
        kept = rounds if rows == 1 and not shared_run and rounds <= _MOST_KEPT_ROUNDS else 1
        ring = Ring.of(layout, rows, warps, rounds)
        x_bytes = layout.run_slices * _x_slice(layout, rows) if shared_run else whole_x
        lanes_copy = rows == 1 and device.capability < STARTS_EARLY and layout.bits > TERNARY_BITS
        small = lanes_copy and x_bytes + 2 * ring.level > device.shared_bytes_per_block
        ring = Ring.of(layout, rows, warps, rounds, has_small_chunks=small)
        return cls(shared_run, in_clusters, exchanges, warps, grid, rounds, kept, ring, small)

    def early_slots(self, layout: PackedLayout, rows: int, *, whole_rows: bool) -> int:
        """Return how many chunks of a warp are copied before x is asked for.

        `whole_rows`: each block normalises all of x.
        """
        if self.kept_rounds > 1 and layout.run_slices <= _JOINED_SLICES:
            return self.ring.slots
        if self.shared_run and whole_rows and rows == _LATE_WEIGHTS_ROWS:
            return 0
        return (_EARLY_BYTES if self.shared_run else _EARLY_SPLIT_BYTES) // self.ring.level

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
class _Memory:
    """A block's shared memory: x whole (`stage_slices` 0) or in stages, the ring of weights, sums that peers send."""

    nbytes: int
    stage_slices: int
    received_apart: bool

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, device: Device, work: _Work, *, is_fed: bool) -> _Memory:
        x_slice, ring, warps = _x_slice(layout, rows), work.ring, work.warps
        barriers = whole_lines(warps * MAX_SLOTS * 8 + _STAGES * 16 + 16)
        received = ceil(warps / layout.runs) * layout.runs * ceil(rows / 8) * 512 if work.in_clusters else 0
        partial = 0 if work.shared_run else work.kept_rounds * warps * 512
        finishing = whole_lines(partial + whole_lines(rows * 36) + rows * 8)
        fixed = barriers + finishing + (received if work.rounds > 1 else 0)
        space = device.shared_bytes_per_block - fixed
        x_bytes = (layout.run_slices if work.shared_run else layout.num_slices) * x_slice
        starts_early = is_fed and work.exchanges and not work.in_clusters  # begins with the first stage of fed rows
        resident = not work.shared_run or (not starts_early and x_bytes + min(ring.slots, 2) * ring.level <= space)
        # A stage has an even number of slices, or one.
        fitting = int(device.shared_bytes_per_block * _STAGE_SHARE) // x_slice
        stage_slices = 0 if resident else min(layout.run_slices, fitting // 2 * 2 or 1)
        held = x_bytes if resident else _stages(device) * stage_slices * x_slice
        used = held + max(1, min(ring.slots, (space - held) // ring.level)) * ring.level
        # Sums from peers have memory of their own if another round needs that of weights and x, or if there is room.
        apart = work.in_clusters and (work.rounds > 1 or used + received <= space)
        own = received if apart and work.rounds == 1 else 0
        return cls(fixed + own + max(used, 0 if apart else received), stage_slices, apart)


def _x_slice(layout: PackedLayout, rows: int) -> int:
    """Return the bytes of a slice of x with its quanta, and with its sums if codes have zero points or minimums."""
    groups = SLICE_COLUMNS // layout.scale_group if layout.zeros else 0
    return SLICE_COLUMNS * 2 * rows + (SINGLE_ROW_SUMS if rows == 1 else (groups + 1) * rows * 4)


def _x_bytes(layout: PackedLayout, rows: int) -> int:
    return layout.num_slices * _x_slice(layout, rows)


def _stages(device: Device) -> int:
    return _STAGES if device.shared_bytes_per_block >= LARGE_SHARED_BYTES else _STAGES - 1


def _block_warps(num_tiles: int, groups: int, device: Device, shared_run: bool) -> int:
    """Return the warps of a block with which the busiest block has the fewest tiles, in the fewest rounds."""
    large = device.shared_bytes_per_block >= LARGE_SHARED_BYTES
    most = (_MOST_RUN_WARPS if shared_run else _MOST_WARPS) if large else _FEW_WARPS
    step, share = (_WARPGROUP, 1) if shared_run else (RUNS, RUNS)

    def busiest(warps: int) -> tuple[int, int]:
        tiles = warps // share
        rounds = ceil(num_tiles / (groups * tiles))
        return rounds * tiles, rounds

    return min(range(RUNS, most + 1, step), key=busiest)
