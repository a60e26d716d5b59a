"""Attention of the rows of a step: how the keys of a row are split over blocks, and the kernel `decode_attention`.

How the keys are cut into runs, and which eight runs are merged first, depends on the device and the context alone. It
never depends on the rows of a step, so neither does a row's result. Which blocks take the runs may depend on the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import QUERY_TILE, HeadConstants, Operands
from cpmrt.cuda.ops.kv import codes_of, nodes_of, scales_of
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.ops import SHORT_KEYS, RowLength
from cpmrt.tensor_spec import BufferSpec

SMS_OF_CLUSTER = {8: 8.8, 4: 4.4, 2: 2}
"""Blocks of a cluster -> multiprocessors that a cluster takes with a block on each (measured on an H200)."""
_STAGES_OF_MANY = 2  # stages of a ring with many rows: the two rings of a multiprocessor keep enough in flight
_NARROW_HEAD = 64  # up to this head_dim a third block of attention fits on a multiprocessor
_MOST_CLUSTERS = 32  # the most clusters whose partial results one block merges for a row
_LEAST_FILL = 0.95  # pairs of blocks, one on each multiprocessor, are used if they fill this part of the device
_LEAST_SHARE = 0.9  # one row has whole clusters, a block on each multiprocessor, if they fill this part of the device
_SMALL_SHARED_MEMORY = (86, 89, 120, 121)  # compute capabilities with 100 KB of shared memory a multiprocessor


@dataclass(frozen=True)
class DecodeConstants(HeadConstants):
    """Compile-time constants of decode_attention.cu. `stages` of the ring of pages; `portable`: without clusters;
    `cluster`: blocks of a cluster; `teams` of four warps in a block; `tree`: rows of draft trees; `window` in keys (0:
    all keys); `selected`: rows of a step (1) or of a prefill chunk (2) that chose blocks; `fp8` pages."""

    stages: int
    portable: bool
    cluster: int = 1
    teams: int = 1
    tree: bool = False
    window: int = 0
    selected: int = 0
    fp8: bool = False


DECODE_ATTENTION = KernelSpec(
    "decode_attention", "attention/decode_attention.cu", "decode_attention", DecodeConstants, hot=True
)


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch of `kernel` for the rows of a step. `sizes` are the integers that only this kernel takes.
    `takes_local`: after the arguments of a selection it takes `local_blocks`, how many blocks before its own every row
    looks at."""

    kernel: KernelSpec
    constants: HeadConstants
    grid: tuple[int, int, int]
    threads: int | tuple[int, int]
    shared_bytes: int
    sizes: tuple[int, ...]
    takes_local: bool = False


@dataclass(frozen=True)
class DecodePlan:
    """The plan of attention in steps. The keys of a row are split over `num_splits` runs of pages; a cluster takes
    `cluster` of them and merges their results.

    With `has_tree_kernel` many rows of trees that see all keys are left to `tree_attention`, with `has_selected_kernel`
    rows that chose blocks to `selected_attention`; both have the same workspace. A tile has `heads` query heads of a KV
    head, and a row of a tree takes `tree_heads` of its 16 rows, half of them or all. `units` blocks share a run of
    pages: one for each tile of each KV head. `is_short`: no row can see more than SHORT_KEYS keys.
    """

    constants: DecodeConstants
    num_splits: int
    cluster: int
    device: Device
    heads: int
    units: int
    has_tree_kernel: bool
    has_selected_kernel: bool
    is_short: bool = False

    @classmethod
    def of(cls, shape: GroupedAttention, device: Device, max_context: int, *, is_fp8: bool = False) -> DecodePlan:
        """Plan for steps of any number of rows; a stage of the ring holds two pages in fp8.

        A single row should keep every multiprocessor reading, so there is one run of pages for each. Clusters of 8
        (sm_90 on) merge partial results without going through memory. Without them one block merges all runs, and more
        than 32 runs would cost it more than they gain in reading. Where clusters with a multiprocessor for each block
        fill most of the device, there are as many as fit so. A context of few pages needs few splits.
        """
        one = cls.of_single_rows(shape, device)
        cluster = 8 if device.capability >= 90 else 1
        runs, whole = device.num_sms // one.units, int(device.num_sms / SMS_OF_CLUSTER[8]) // one.units
        if cluster > 1 and whole * one.units * SMS_OF_CLUSTER[8] >= _LEAST_SHARE * device.num_sms:
            runs = whole * cluster
        wanted = min(runs, pages_for(max_context), _MOST_CLUSTERS * cluster)
        return replace(
            one,
            constants=replace(one.constants, portable=device.is_portable, cluster=cluster, selected=0, fp8=is_fp8),
            num_splits=max(1, wanted // cluster) * cluster,
            cluster=cluster,
            has_tree_kernel=device.capability == 90,
            has_selected_kernel=device.capability == 90 and not is_fp8,
            is_short=max_context <= SHORT_KEYS,
        )

    @classmethod
    def of_single_rows(cls, shape: GroupedAttention, device: Device) -> DecodePlan:
        """Plan for rows of a prefill chunk that chose blocks. There are so many that one block takes all runs of a tile
        of a row's heads, which needs no workspace."""
        group = shape.num_heads // shape.num_kv_heads
        tiles = ceil(group / QUERY_TILE)
        stages = 2 if device.capability in _SMALL_SHARED_MEMORY else 3
        return cls(
            constants=DecodeConstants(shape.head_dim, group, stages, portable=True, selected=2),
            num_splits=1,
            cluster=1,
            device=device,
            heads=ceil(group / tiles),
            units=shape.num_kv_heads * tiles,
            has_tree_kernel=False,
            has_selected_kernel=False,
        )

    @property
    def tree_heads(self) -> int:
        return QUERY_TILE // 2 if self.heads <= QUERY_TILE // 2 else QUERY_TILE

    @property
    def tables(self) -> tuple[BufferSpec, BufferSpec]:
        """The workspace, which lives as long as the executor: partial results that clusters leave for the block that
        merges them, and counters of the blocks that have left theirs, which are zero before and after a launch."""
        heads, clusters = self.tree_heads if self.has_tree_kernel else self.heads, self.num_splits // self.cluster
        partials = MAX_ROWS * self.units * clusters * heads * self.constants.head_dim * 5 // 4
        arrivals = MAX_ROWS * self.units * self.cluster
        return (
            BufferSpec("attention_partials", (partials,), EMBED, HEAD, np.float32),
            BufferSpec("attention_arrivals", (arrivals,), EMBED, HEAD, np.int32, zeroed=True),
        )

    @property
    def clusters_at_once(self) -> int:
        """How many clusters find room on the device at the same time, with two blocks on a multiprocessor."""
        return int(2 * self.device.num_sms / SMS_OF_CLUSTER[self.cluster])

    def launch(self, rows: int, constants: DecodeConstants, *, length: RowLength | None = None) -> AttentionLaunch:
        """Return the launch of `decode_attention` for `rows` rows of this length. The grid, and how many blocks share a
        row's runs, may depend on both: which block takes a run does not change the result."""
        if rows > 1 and self.cluster > 1 and not (constants.tree or constants.selected or constants.fp8):
            constants = self._of_rows(rows, constants, is_long=length == "long")
        units, blocks = self.units, constants.cluster
        has_one = rows == 1 and self._needs_one_cluster(constants, length)
        clusters = 1 if has_one else self._clusters(rows, constants)
        return AttentionLaunch(
            kernel=DECODE_ATTENTION,
            constants=constants,
            grid=(blocks * clusters, units, 1) if rows == 1 else (blocks, units * rows, clusters),
            threads=128 if constants.teams == 1 else (128, constants.teams),
            shared_bytes=max(self._shared_bytes(constants), self._apart(rows, clusters, constants)),
            sizes=(self.num_splits,),
        )

    def _needs_one_cluster(self, constants: DecodeConstants, length: RowLength | None) -> bool:
        """Whether a single row has so few keys that one cluster takes them all.

        Further clusters would have no keys, but could take the room beside the product before from the one that has: at
        1,000 keys one of two clusters began 3 us later because of that.
        """
        is_plain = not (constants.tree or constants.selected or constants.window)
        return self.cluster > 1 and is_plain and (self.is_short or length == "short")

    def _clusters(self, rows: int, constants: DecodeConstants) -> int:
        """Return how many clusters share the runs of a row with many runs: as many as find room at once."""
        room = 2 * self.device.num_sms if constants.cluster == self.cluster else self.device.num_sms
        at_once = max(1, room // (self.units * rows * constants.cluster))
        return min(at_once, self.num_splits // self.cluster)

    def _apart(self, rows: int, clusters: int, constants: DecodeConstants) -> int:
        """Return the bytes of shared memory with which each block of one row gets a multiprocessor to itself.

        0 means that two blocks may share one. The hardware may put two on one multiprocessor while others have none:
        134 MB of keys took 37 to 41 us like that, and 36 us apart. At 1,000 keys the two clusters of an 8B took 1 us
        less apart, where both find room beside the product before.
        """
        finds_room = self.cluster > 1 and clusters * self.units <= self.device.whole_clusters
        is_apart = rows == 1 and finds_room and not (constants.tree or constants.selected)
        return self.device.lone_block_bytes if is_apart else 0

    @property
    def row_bytes(self) -> int:
        """The bytes of shared memory of a block for one row without a tree, a window or chosen blocks."""
        return self._shared_bytes(self.constants)

    def _of_rows(self, rows: int, constants: DecodeConstants, *, is_long: bool) -> DecodeConstants:
        """Return the constants for several plain rows over 16-bit pages: a block for each run while all clusters find
        room at once, then fewer blocks a row, so that no row has to wait until another ends.

        Where pairs of blocks with a multiprocessor for each block fill the device, they keep it reading. Short rows
        take longer in pairs, as each block of a pair has four runs (8 rows of 1K keys take 10 us instead of 7, but of
        8K keys 25 instead of 34).
        """
        row_units, is_narrow = rows * self.units, constants.head_dim <= _NARROW_HEAD
        finds_room = row_units <= (self.clusters_at_once * 3 // 2 if is_narrow else self.clusters_at_once)
        has_pairs = not is_narrow and self._pairs_fill(row_units)
        if finds_room and not (is_long and has_pairs):
            # Where wide blocks take more than half of the multiprocessors, two stages leave the next kernel room beside
            # them: 8 rows of an 8B take 1 % less time for a step.
            fills = not is_narrow and 2 * row_units * constants.cluster > self.device.num_sms
            return replace(constants, stages=_STAGES_OF_MANY) if fills else constants
        cluster, teams = (2, 2) if has_pairs else (4, 1)
        if row_units * cluster > self.device.num_sms * 3 // 2:
            cluster, teams = (2 if row_units * 2 <= self.device.num_sms else 1), 2
        many = replace(constants, stages=_STAGES_OF_MANY, cluster=cluster, teams=teams)
        return many if self._shared_bytes(many) <= self.device.shared_bytes_per_block else constants

    def _pairs_fill(self, row_units: int) -> bool:
        """Whether two or more pairs of blocks for each unit of each row fill the device, with work for every pair."""
        num_sms = self.device.num_sms
        pairs = num_sms // (2 * row_units)
        return 2 <= pairs <= self.num_splits // self.cluster and 2 * pairs * row_units >= _LEAST_FILL * num_sms

    def _shared_bytes(self, constants: DecodeConstants) -> int:
        """Return the bytes of shared memory of a block: query and ring of each team, results from its cluster."""
        head_dim, received = constants.head_dim, 5 * self.heads * constants.head_dim * self.cluster // constants.cluster
        team = QUERY_TILE * head_dim * 2 + constants.stages * PAGE_SIZE * head_dim * 4
        return constants.teams * team + (received if self.cluster > 1 else 0)


@dataclass(frozen=True)
class AttentionScratch:
    """The workspace of rows whose keys are split over blocks; None for other rows."""

    partials: DeviceArray | None = None
    arrivals: DeviceArray | None = None


def attend_rows(
    launch: Launcher, one: AttentionLaunch, scratch: AttentionScratch, given: Operands, *, prefers_shared: bool = False
) -> None:
    """Launch `decode_attention`, `tree_attention` or `selected_attention`, whose arguments have the same order."""
    kv, rows, selection = given.kv, given.rows, given.selection
    chosen: tuple[DeviceArray | np.generic, ...] = ()
    if selection is not None:
        sparse = selection.config
        local = (sparse.local_blocks,) if one.takes_local else ()
        chosen = selection.blocks, *map(np.int32, (sparse.num_selected, sparse.dense_context, *local))
    launch(
        one.kernel, one.constants, one.grid, one.threads,
        given.out, scratch.partials, scratch.arrivals, given.q, codes_of(kv.k), codes_of(kv.v), rows.positions,
        rows.slots, rows.block_tables, rows.tree_masks, rows.tree_base, *map(np.int32, one.sizes), *given.sizes,
        *chosen, *scales_of(kv.k, kv.v), *(nodes_of(kv.k, kv.v) if rows.tree_masks is not None else ()),
        smem=one.shared_bytes, prefers_shared=prefers_shared,
    )  # fmt: skip
