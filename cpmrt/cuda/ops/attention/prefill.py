"""Attention of a prefill chunk over all keys: `prefill_attention`, and on sm_90 `prefill_attention_wgmma`.

Both read every page again for each tile of rows, on tensor cores that take 16 bits. Pages in fp8 are first expanded,
exactly, into a workspace of one sequence in one layer, where page p of the sequence is page p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument, row_boxes
from cpmrt.cuda.ops.attention import HeadConstants, Operands
from cpmrt.cuda.ops.kv import codes_of, scales_of
from cpmrt.memory.caches import PAGE_SIZE, CacheLayout
from cpmrt.models.layers import ATTENTION, EMBED, HEAD
from cpmrt.ops import KVPages
from cpmrt.tensor_spec import BufferSpec


@dataclass(frozen=True)
class PrefillConstants(HeadConstants):
    """`window` in keys; 0: all of them."""

    window: int


@dataclass(frozen=True)
class ExpandConstants:
    """Elements of a head."""

    head_dim: int


PREFILL_ATTENTION = KernelSpec(
    "prefill_attention", "attention/prefill_attention.cu", "prefill_attention", PrefillConstants, hot=True
)
PREFILL_WGMMA = replace(
    PREFILL_ATTENTION, name="prefill_attention_wgmma", file="attention/prefill_attention_wgmma.cu", arch="sm_90"
)
EXPAND_PAGES = KernelSpec("expand_pages", "attention/expand_pages.cu", "prefill_attention", ExpandConstants, hot=True)
_EXPAND_THREADS = 256
_MOST_EXPAND_BLOCKS = 512
"""The grid's first dimension: enough blocks for every multiprocessor, few enough to end at once without pages."""


@dataclass(frozen=True)
class PrefillPlan:
    """How the kernel of a chunk is launched.

    A tile has at most `rows_per_tile` rows and takes `blocks_per_tile` blocks. Where tiles share the rows evenly there
    are a multiple of `tiles_at_once`, so that the device has work to the end. With `box_columns` the kernel takes
    tensor maps of the pages, in boxes of a page's rows and so many columns.
    """

    kernel: KernelSpec
    heads: HeadConstants
    blocks_per_tile: int
    rows_per_tile: int
    threads: int
    shared_bytes: int
    box_columns: int | None = None
    tiles_at_once: int = 1

    @classmethod
    def of(cls, shape: GroupedAttention, capability: int) -> PrefillPlan:
        """Plan for the kernel of a compute capability, as 90. Heads of one KV head share a block where the group
        allows."""
        heads = HeadConstants(shape.head_dim, shape.num_heads // shape.num_kv_heads)
        if capability == 90:
            # The sizes that the kernel chooses: 64 rows a warpgroup, three stages of two pages.
            warpgroups, stages = 3 if heads.head_dim == 64 else 2, 3
            together, tile_rows, barriers = warpgroups, 64 * warpgroups, 4 * stages + 1
        else:
            warpgroups, stages, together, tile_rows, barriers = 0, 1, 2, 128, 0
        per_block = together if heads.group % together == 0 else 1
        return cls(
            kernel=PREFILL_WGMMA if capability == 90 else PREFILL_ATTENTION,
            heads=heads,
            blocks_per_tile=shape.num_heads // per_block,
            rows_per_tile=tile_rows // per_block,
            threads=(warpgroups + 1) * 128,
            shared_bytes=(tile_rows + stages * 4 * PAGE_SIZE) * heads.head_dim * 2 + barriers * 8,
            box_columns=box_columns(heads.head_dim) if capability == 90 else None,
        )

    def grid(self, rows: int) -> tuple[int, int]:
        """The grid for a bucket of `rows` rows: blocks of a tile, tiles."""
        return self.blocks_per_tile, ceil(rows / (self.rows_per_tile * self.tiles_at_once)) * self.tiles_at_once

    def pages(self, launch: Launcher, kv: KVPages) -> tuple[KernelArgument, KernelArgument]:
        """Return keys and values as the kernel takes them: the pages, or tensor maps of them."""
        if self.box_columns is None or launch.is_recording:
            return kv.k, kv.v
        return row_boxes(kv.k, PAGE_SIZE, self.box_columns), row_boxes(kv.v, PAGE_SIZE, self.box_columns)


def box_columns(head_dim: int) -> int:
    """Return the elements of a row that lie together in shared memory on sm_90."""
    return 32 if head_dim == 96 else 64


def attend_chunk(launch: Launcher, plan: PrefillPlan, given: Operands, chunk: DeviceArray, window: int = 0) -> None:
    """Attend from the rows of `chunk` (int32: slot, start, count) over all that they see; pages in 16 bits."""
    launch(
        plan.kernel, PrefillConstants(plan.heads.head_dim, plan.heads.group, window), plan.grid(len(given.q)),
        plan.threads, given.out, given.q, *plan.pages(launch, given.kv), given.rows.block_tables, chunk, *given.sizes,
        smem=plan.shared_bytes,
    )  # fmt: skip


@dataclass(frozen=True)
class ExpandedPages:
    """Room for the keys and values of one sequence in one layer, and the block tables that find them there."""

    k: DeviceArray
    v: DeviceArray
    block_tables: DeviceArray

    def expand(self, launch: Launcher, given: Operands, chunk: DeviceArray) -> Operands:
        """Expand the pages of the chunk's slot, and return what attention takes instead."""
        kv, rows, (num_pages, num_kv_heads, _, head_dim) = given.kv, given.rows, self.k.shape
        grid = (min(num_pages, _MOST_EXPAND_BLOCKS), 2 * num_kv_heads)
        launch(
            EXPAND_PAGES, ExpandConstants(head_dim), grid, _EXPAND_THREADS,
            self.k, self.v, codes_of(kv.k), codes_of(kv.v), *scales_of(kv.k, kv.v), rows.block_tables, chunk,
            *given.sizes[:2],
        )  # fmt: skip
        return replace(given, kv=KVPages(self.k, self.v), rows=replace(rows, block_tables=self.block_tables))


def expanded_workspace(caches: CacheLayout) -> tuple[BufferSpec, ...]:
    """Return the room for expanded pages, which a step shares with what does not live during attention."""
    shape = (caches.pages_per_sequence, *caches.specs["k_codes"].shape)
    return tuple(BufferSpec(name, shape, ATTENTION, ATTENTION) for name in ("expanded_k", "expanded_v"))


def expanded_tables(caches: CacheLayout) -> tuple[BufferSpec, ...]:
    """Return the block tables of expanded pages, the same for every slot, which live as long as the executor."""
    shape = (caches.max_sequences, caches.pages_per_sequence)
    return (BufferSpec("expanded_tables", shape, EMBED, HEAD, np.int32),)
