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
    """Compile-time constants of the kernels of a chunk; `window` in keys, 0 for all keys."""

    window: int


@dataclass(frozen=True)
class ExpandConstants:
    """Compile-time constants of expand_pages.cu: the elements of a head."""

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
"""The most blocks in the grid's first dimension: enough for every multiprocessor, and few enough that those without
pages cost little."""


@dataclass(frozen=True)
class PrefillPlan:
    """The plan by which the attention kernel of a chunk is launched.

    A tile has at most `rows_per_tile` rows and takes `blocks_per_tile` blocks. The number of tiles is a multiple of
    `tiles_at_once`: for a kernel whose tiles share the rows evenly, this keeps the device busy to the end. With
    `box_columns` the kernel takes tensor maps of the pages, in boxes of a page's rows and so many columns.
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
        """Plan for the kernel of a compute capability, such as 90. Query heads of one KV head share a block where their
        number allows it."""
        heads = HeadConstants(shape.head_dim, shape.num_heads // shape.num_kv_heads)
        if capability == 90:
            # As in prefill_attention_wgmma.cu: 64 rows a warpgroup, three stages of two pages.
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
        """Return the grid for a bucket of `rows` rows: (blocks of a tile, tiles)."""
        return self.blocks_per_tile, ceil(rows / (self.rows_per_tile * self.tiles_at_once)) * self.tiles_at_once

    def pages(self, launch: Launcher, kv: KVPages) -> tuple[KernelArgument, KernelArgument]:
        """Return keys and values as the kernel takes them: the pages, or tensor maps of them."""
        if self.box_columns is None or launch.is_recording:
            return kv.k, kv.v
        return row_boxes(kv.k, PAGE_SIZE, self.box_columns), row_boxes(kv.v, PAGE_SIZE, self.box_columns)


def box_columns(head_dim: int) -> int:
    """Return the columns of the boxes in which rows of a head are copied to shared memory on sm_90."""
    return 32 if head_dim == 96 else 64


def attend_chunk(launch: Launcher, plan: PrefillPlan, given: Operands, chunk: DeviceArray, window: int = 0) -> None:
    """Launch attention of the rows of `chunk` (int32: slot, start, count) over all keys they see, in 16-bit pages."""
    launch(
        plan.kernel, PrefillConstants(plan.heads.head_dim, plan.heads.group, window), plan.grid(len(given.q)),
        plan.threads, given.out, given.q, *plan.pages(launch, given.kv), given.rows.block_tables, chunk, *given.sizes,
        smem=plan.shared_bytes,
    )  # fmt: skip


@dataclass(frozen=True)
class ExpandedPages:
    """The buffers for the 16-bit keys and values of one sequence in one layer, and the block tables for them."""

    k: DeviceArray
    v: DeviceArray
    block_tables: DeviceArray

    def expand(self, launch: Launcher, given: Operands, chunk: DeviceArray) -> Operands:
        """Expand the fp8 pages of the chunk's slot, and return the operands with the expanded pages in their place."""
        kv, rows, (num_pages, num_kv_heads, _, head_dim) = given.kv, given.rows, self.k.shape
        grid = (min(num_pages, _MOST_EXPAND_BLOCKS), 2 * num_kv_heads)
        launch(
            EXPAND_PAGES, ExpandConstants(head_dim), grid, _EXPAND_THREADS,
            self.k, self.v, codes_of(kv.k), codes_of(kv.v), *scales_of(kv.k, kv.v), rows.block_tables, chunk,
            *given.sizes[:2],
        )  # fmt: skip
        return replace(given, kv=KVPages(self.k, self.v), rows=replace(rows, block_tables=self.block_tables))


def expanded_workspace(caches: CacheLayout) -> tuple[BufferSpec, ...]:
    """Return the buffers of expanded pages. They live during attention only, so others may have the same memory."""
    shape = (caches.pages_per_sequence, *caches.specs["k_codes"].shape)
    return tuple(BufferSpec(name, shape, ATTENTION, ATTENTION) for name in ("expanded_k", "expanded_v"))


def expanded_tables(caches: CacheLayout) -> tuple[BufferSpec, ...]:
    """Return the block tables of expanded pages, the same for every slot, which live as long as the executor."""
    shape = (caches.max_sequences, caches.pages_per_sequence)
    return (BufferSpec("expanded_tables", shape, EMBED, HEAD, np.int32),)
