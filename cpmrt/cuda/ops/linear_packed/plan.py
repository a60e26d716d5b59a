"""Plans a skinny product with packed weights: how `linear_packed/linear_packed.cu` is compiled and launched.

The packed layout fixes the order of a sum, so it depends on the weight's shape and the device alone (row invariance).
The other constants may depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import LARGE_SHARED_BYTES, row_bucket
from cpmrt.cuda.ops.linear_packed.constants import LatentQueriesConstants, LinearPackedConstants, PrepareConstants
from cpmrt.cuda.ops.linear_packed.division import (
    MOST_KEPT_ROUNDS,
    ROW_BUCKETS,
    BlockMemory,
    Division,
    has_pairs,
    num_stages,
    x_bytes,
    x_slice_bytes,
)
from cpmrt.cuda.ops.linear_packed.layout import RUNS, SLICE_COLUMNS, TILE_ROWS, PackedLayout
from cpmrt.cuda.ops.linear_packed.ring import MAX_SLOTS, Ring
from cpmrt.weights.ternary import TERNARY_BITS

_HEAD_WARPS = 16  # of a block that makes a head of the queries of latent attention
# From so many rows on prepare_rows normalises them once, unless the blocks of a cluster each normalise a part.
_PREPARED_ROWS = 8
# From so many rows on a gate_up product whose blocks write whole slices of its rows spares the next one prepare_rows.
_FEEDING_ROWS = 8
# When the next kernel may start (TRIGGER). At 64 rows the one after a residual product is prepare_rows, whose blocks
# take registers from the product after it. x of _ROWS_BEFORE_NEXT rows would queue behind the early reads of the next
# kernel: of q, k and v in clusters, of the others outside of them.
_AT_ONCE, _AT_END, _BEHIND_X, _BEFORE_WAIT, _LATE_TRIGGER_ROWS = 0, 1, 2, 3, 64
_ROWS_BEFORE_NEXT = {"qkv": 8, "residual": 32, "gate_up": 32}
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
        return x_bytes(self.layout, own.rows) + sums if own.prepared else 0

    @property
    def fed(self) -> PrepareConstants | None:
        """The constants with which `PREPARE`, without a norm, would write what the kernel also writes for the next
        product, to a buffer of `fed_bytes`. None if the kernel writes its output only."""
        return replace(self.prepare, in_features=self._fed_columns) if self.constants.feeds else None

    @property
    def fed_bytes(self) -> int:
        slices = self._fed_columns // SLICE_COLUMNS
        return slices * x_slice_bytes(self.layout, self.constants.rows) if self.constants.feeds else 0

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
    division = Division.of(layout, rows, device)
    memory = BlockMemory.of(layout, rows, device, division, is_fed=is_fed)
    normalises = has_norm and layout.product != "residual"
    from_memory = normalises and not division.in_clusters and (rows >= _PREPARED_ROWS or division.exchanges)
    constants = _constants(
        layout, rows, device, division, memory,
        normalises=normalises, prepared=permuted or is_fed or memory.stage_slices > 0 or from_memory,
        row_pitch=row_pitch, starts_next=starts_next and layout.product == "qkv" and has_pairs(layout, rows, device),
    )  # fmt: skip
    # One row with a block for each multiprocessor asks for so much shared memory that no two blocks share one. So does
    # a product behind which attention waits already: it would wait 0.5 us longer for two that did.
    fills = rows == 1 and division.grid == device.num_sms
    alone = device.lone_block_bytes if fills or constants.trigger == _BEFORE_WAIT else 0
    shared_bytes, is_narrow = max(memory.nbytes, alone), _width(layout) <= _NARROW_WIDTH
    return PackedPlan(layout, constants, division.grid, division.warps * 32, shared_bytes, is_narrow)


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
    fits = layout.runs == RUNS and layout.run_slices == 1 and rounds * at_once == tiles and rounds <= MOST_KEPT_ROUNDS
    if layout.out_features != num_heads * tiles * TILE_ROWS or not fits or not is_large:
        return None
    ring = Ring.of(layout, 1, _HEAD_WARPS, rounds)
    division = Division(False, False, False, _HEAD_WARPS, num_heads, rounds, rounds, ring)
    return _plan_row(layout, device, division, row_pitch)


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
    return _plan_row(layout, device, Division(False, False, False, RUNS, num_kv_heads * RUNS, rounds, 1, ring))


def plan_columns(layout: PackedLayout, num_blocks: int, device: Device) -> PackedPlan | None:
    """Plan the product "gate_up" of one normalised row in which each of `num_blocks` blocks makes neighbouring columns,
    with eight warps and room for all its weights at once; None where that does not fit."""
    rounds, rest = divmod(layout.num_tiles, num_blocks)
    if rest or layout.runs != RUNS or layout.run_slices > 1 or not 0 < rounds <= MOST_KEPT_ROUNDS:
        return None
    ring = Ring.of(layout, 1, RUNS, rounds)
    division = Division(False, False, False, RUNS, num_blocks, rounds, rounds, ring)
    return _plan_row(layout, device, division) if ring.slots == rounds else None


def _plan_row(layout: PackedLayout, device: Device, division: Division, row_pitch: int | None = None) -> PackedPlan:
    memory = BlockMemory.of(layout, 1, device, division, is_fed=False)
    constants = _constants(
        layout, 1, device, division, memory, normalises=True, prepared=False, row_pitch=row_pitch
    )  # fmt: skip
    return PackedPlan(layout, constants, division.grid, division.warps * 32, memory.nbytes, prefers_shared=True)


def _constants(
    layout: PackedLayout, rows: int, device: Device, division: Division, memory: BlockMemory,
    *, normalises: bool, prepared: bool, row_pitch: int | None, starts_next: bool = False,
) -> LinearPackedConstants:
    # Ternary weights come so fast that the first warps should begin soon: EARLY_WARPS and OWN_RUNS. One row's products
    # in 4 bits wait for memory, and lose by both; qkv also waits for the row's place and was not measured with them.
    is_ternary_row = rows == 1 and layout.bits == TERNARY_BITS and layout.product != "qkv"
    shares_runs = layout.product == "residual" and not prepared and division.shares_runs
    own_norm = normalises and not prepared
    is_early_by_half = division.is_early_by_half(layout, rows)
    return LinearPackedConstants(
        **layout.sizes, rows=rows, norm=normalises, prepared=prepared, portable=device.is_portable,
        warps=division.warps, shared_run=division.shared_run, clusters=division.in_clusters,
        kept_rounds=division.kept_rounds,
        warpgroups=division.multiplies_together(rows, layout) and not device.is_portable,
        feeds=rows >= _FEEDING_ROWS and division.has_whole_slices(layout),
        early_slots=division.early_slots(layout, rows, device),
        small_chunks=division.small_chunk or None,
        tile_copies=(own_norm and division.ring.copies_tiles(layout, division.kept_rounds, device)) or None,
        early_warps=division.warps // 2 if is_early_by_half else division.early_warps if is_ternary_row else None,
        own_runs=True if is_ternary_row and shares_runs else None,
        received_apart=memory.received_apart, stage_slices=memory.stage_slices, stages=num_stages(device),
        smem_bytes=memory.nbytes, row_pitch=row_pitch,
        trigger=_BEFORE_WAIT if starts_next else _trigger(layout, rows, division),
    )  # fmt: skip


def _trigger(layout: PackedLayout, rows: int, division: Division) -> int:
    product = layout.product
    if product == "residual" and rows >= _LATE_TRIGGER_ROWS:
        return _AT_END
    exchanges = division.exchanges and division.in_clusters == (product == "qkv")
    is_wide = layout.runs == 1 if product == "gate_up" else exchanges
    return _BEHIND_X if is_wide and _ROWS_BEFORE_NEXT.get(product) == rows else _AT_ONCE  # others were not measured


def _width(layout: PackedLayout) -> int:
    """Return the columns of the residual stream, which a product reads or adds to."""
    return layout.out_features if layout.product == "residual" else layout.in_features
