"""The ops of latent attention: `append_latent`, `decode_latent_attention`, `prefill_latent_attention`.

Rows of a step attend in the space of the latents, in three launches. The first takes queries there and stores the rows'
own latents in the pages. The second computes a result for each run of pages. The third merges these results and makes
values of heads of them. For the rows of a chunk the latents of the sequence are expanded to keys and values of heads,
which `prefill_attention` reads: a pair of tokens then costs a third of the multiplications. Heads are taken in
parts, as many at a time as there is room for their expanded pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil

import numpy as np

from cpmrt.config.layers import GroupedAttention, LatentAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument, row_boxes
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import QUERY_TILE, Operands
from cpmrt.cuda.ops.attention.prefill import PrefillPlan, attend_chunk
from cpmrt.cuda.ops.linear import FETCHING_CAPABILITY
from cpmrt.cuda.ops.linear_packed.constants import LATENT_QUERIES
from cpmrt.cuda.ops.linear_packed.layout import PackedWeight, Weight, data_of
from cpmrt.cuda.ops.linear_packed.plan import latent_queries, plan_heads
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import PAGE_SIZE, CacheLayout
from cpmrt.models.layers import ATTENTION, EMBED, HEAD
from cpmrt.ops import KVPages, LatentWeights, Rows, check_latent_shapes, check_shapes
from cpmrt.tensor_spec import BufferSpec

EXPANDED_BYTES = 512 << 20
"""The most bytes of expanded pages at a time, unless a single head needs more."""
_STAGES, _MOST_SPLITS = 2, 256
_WGMMA_HEADS, _WGMMA_STAGES, _ALIGNED, _BOX_COLUMNS = 64, 4, 1024, 64
_BLOCK, _ATTEND_BLOCK, _EXPAND_BLOCK, _MERGE_BLOCK, _MOST_EXPAND_BLOCKS = 256, 128, 128, 512, 64
_ROW_BLOCKS_PER_SM, _RUNS_PER_SM = 2, 3
"""Blocks on a multiprocessor: of the small products of heads, and of those that take runs of pages."""
_UPCOMING_BYTES = 8 << 20
"""The most bytes of a later weight that are brought to the L2 while a step attends, after the pages."""


@dataclass(frozen=True)
class AppendConstants:
    """Compile-time constants of append_latent.cu: elements of the queries' latent, the KV latent, the rotated key."""

    q_rank: int
    kv_rank: int
    rope_dim: int


@dataclass(frozen=True)
class AbsorbConstants:
    """Compile-time constants of absorb_queries.cu: elements of a latent, a query's plain and rotated part, a value."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class LatentConstants:
    """Compile-time constants of latent_attention.cu: query heads, elements of a latent and of the rotated key after it;
    `stages`: pages in shared memory; `tree`: whether the rows are those of draft trees."""

    heads: int
    kv_rank: int
    rope_dim: int
    stages: int
    tree: bool


@dataclass(frozen=True)
class MergeConstants:
    """Compile-time constants of merge_latents.cu: query heads, elements of a latent, a head's plain key, a value."""

    heads: int
    kv_rank: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ExpandLatentsConstants(AbsorbConstants):
    """Compile-time constants of expand_latents.cu; `head_dim`: elements of a row of expanded pages."""

    head_dim: int


@dataclass(frozen=True)
class ChunkConstants:
    """Compile-time constants of latent_chunk.cu: elements of a query's plain and rotated part, and of a value."""

    nope_dim: int
    rope_dim: int
    value_dim: int


Project = Callable[[DeviceArray, DeviceArray, DeviceArray, Weight, float], None]
"""The type of the op `project`."""
_plan_heads = lru_cache(maxsize=64)(plan_heads)
_DECODE, _PREFILL = "decode_latent_attention", "prefill_latent_attention"
APPEND = KernelSpec("append_latent", "rows/append_latent.cu", "append_latent", AppendConstants, hot=True)
ABSORB = KernelSpec("absorb_queries", "attention/absorb_queries.cu", _DECODE, AbsorbConstants, hot=True)
ATTEND = KernelSpec("latent_attention", "attention/latent_attention.cu", _DECODE, LatentConstants, hot=True)
MERGE = KernelSpec("merge_latents", "attention/merge_latents.cu", _DECODE, MergeConstants, hot=True)
ATTEND_WGMMA = replace(
    ATTEND, name="latent_attention_wgmma", file="attention/latent_attention_wgmma.cu", arch="sm_90"
)
EXPAND = KernelSpec("expand_latents", "attention/expand_latents.cu", _PREFILL, ExpandLatentsConstants, hot=True)
ROTATE_HEADS = KernelSpec("rotate_heads", "attention/latent_chunk.cu", _PREFILL, ChunkConstants, hot=True)
GATHER_HEADS = KernelSpec("gather_heads", "attention/latent_chunk.cu", _PREFILL, ChunkConstants, hot=True)


@dataclass(frozen=True)
class LatentPlan:
    """The plan by which layers of latent attention attend on a device.

    A row's pages are cut into at most `num_splits` runs: by the device and the context alone, so a row's bits do not
    depend on the step. `units` blocks share a run, one for every 16 heads, or with `attend` ATTEND_WGMMA for every 64.
    A chunk has at most `max_rows` rows and takes `heads_at_once` heads at a time, as `prefill` plans; other steps have
    at most `step_rows` rows.
    """

    shape: LatentAttention
    attend: KernelSpec
    num_splits: int
    units: int
    heads_at_once: int
    prefill: PrefillPlan
    num_pages: int
    max_sequences: int
    max_rows: int
    step_rows: int
    device: Device

    @classmethod
    def of(
        cls, shape: LatentAttention, device: Device, caches: CacheLayout, max_rows: int, step_rows: int
    ) -> LatentPlan:
        """Plan attention over the pages of these caches."""
        pages = caches.pages_per_sequence
        head_bytes = 2 * pages * PAGE_SIZE * shape.query_dim * 2
        most = max(1, EXPANDED_BYTES // head_bytes)
        heads = next(n for n in range(min(most, shape.num_heads), 0, -1) if shape.num_heads % n == 0)
        attend = ATTEND_WGMMA if _takes_wgmma(shape, device) else ATTEND
        return cls(
            shape=shape,
            attend=attend,
            num_splits=min(device.num_sms, pages, _MOST_SPLITS),
            units=ceil(shape.num_heads / (_WGMMA_HEADS if attend is ATTEND_WGMMA else QUERY_TILE)),
            heads_at_once=heads,
            prefill=PrefillPlan.of(GroupedAttention(heads, heads, shape.query_dim), device.capability),
            num_pages=pages,
            max_sequences=caches.max_sequences,
            max_rows=max_rows,
            step_rows=step_rows,
            device=device,
        )

    @property
    def tables(self) -> tuple[BufferSpec, ...]:
        """The block tables of expanded pages, the same for every slot, which live as long as the executor."""
        return (BufferSpec("expanded_tables", (self.max_sequences, self.num_pages), EMBED, HEAD, np.int32),)

    @property
    def workspace(self) -> tuple[BufferSpec, ...]:
        """The buffers that live during attention only."""
        shape, heads, sums = self.shape, self.heads_at_once, (self.num_splits, self.shape.num_heads)
        pages = (self.num_pages, heads, PAGE_SIZE, shape.query_dim)
        sizes: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("latent_queries", (self.step_rows, shape.num_heads * shape.cached_dim)),
            ("expanded_k", pages),
            ("expanded_v", pages),
            ("head_queries", (self.max_rows, heads * shape.query_dim)),
            ("head_attention", (self.max_rows, heads * shape.query_dim)),
        )
        return (
            BufferSpec("latent_means", (self.step_rows, *sums, shape.kv_rank), ATTENTION, ATTENTION, np.float32),
            BufferSpec("latent_log_sums", (self.step_rows, *sums[::-1]), ATTENTION, ATTENTION, np.float32),
            *(BufferSpec(name, size, ATTENTION, ATTENTION) for name, size in sizes),
        )

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block of the kernel `attend`."""
        row_bytes = self.shape.cached_dim * 2
        if self.attend is ATTEND:
            return _STAGES * PAGE_SIZE * row_bytes + 2560
        queries = ceil(min(self.shape.num_heads, _WGMMA_HEADS) / 8) * 8 * row_bytes
        ring = _WGMMA_STAGES * PAGE_SIZE * row_bytes
        return ceil(queries / _ALIGNED) * _ALIGNED + ring + MAX_ROWS * 4 + _WGMMA_STAGES * 8

    @property
    def upcoming_bytes(self) -> int:
        """The most bytes of a later weight that a step also brings to the L2; 0 where the device cannot."""
        return _UPCOMING_BYTES if self.device.capability >= FETCHING_CAPABILITY else 0

    @property
    def stages(self) -> int:
        """Pages in the shared memory of a block of the kernel `attend`."""
        return _STAGES if self.attend is ATTEND else _WGMMA_STAGES

    def runs_at_once(self, rows: int) -> int:
        """Return how many blocks take the runs of a row in turn; results do not depend on their number."""
        per_sm = _RUNS_PER_SM if self.attend is ATTEND else 1
        return min(self.num_splits, max(1, per_sm * self.device.num_sms // (rows * self.units)))

    def boxes(self, launch: Launcher, pages: DeviceArray) -> tuple[KernelArgument, ...]:
        """Return the kernel's arguments after the pages: with wgmma, tensor maps of latents and of rotated keys."""
        if self.attend is ATTEND:
            return ()
        if launch.is_recording:
            return pages, pages
        return row_boxes(pages, PAGE_SIZE, _BOX_COLUMNS), row_boxes(pages, PAGE_SIZE, self.shape.rope_dim)

    def row_blocks(self, rows: int) -> int:
        """Return how many blocks of each head share `rows` rows in the small products."""
        return min(rows, max(1, _ROW_BLOCKS_PER_SM * self.device.num_sms // self.shape.num_heads))


class LatentOps:
    """The ops of latent attention of `ops.protocol.Ops`.

    `arrays` holds the plan's buffers by name, and `chunk`: slot, start and count of a prefill chunk.
    """

    def __init__(
        self, launcher: Launcher, plan: LatentPlan, arrays: Mapping[str, DeviceArray], project: Project | None = None
    ):
        self._project = project
        self._launch, self._plan, self._chunk = launcher, plan, arrays["chunk"]
        self._queries: DeviceArray = arrays["latent_queries"]
        self._runs = arrays["latent_means"], arrays["latent_log_sums"]
        self._expanded = KVPages(arrays["expanded_k"], arrays["expanded_v"])
        self._tables: DeviceArray = arrays["expanded_tables"]
        self._head_queries, self._head_attention = arrays["head_queries"], arrays["head_attention"]

    def append_latent(
        self, q_latent: DeviceArray, pages: DeviceArray, latents: DeviceArray, weights: LatentWeights,
        rope: DeviceArray, rows: Rows, eps: float,
    ) -> None:  # fmt: skip
        """Launch the op `append_latent`."""
        check_shapes(
            "append_latent", q_latent=q_latent, pages=pages, latents=latents, q_norm=weights.q_norm,
            kv_norm=weights.kv_norm, rope=rope, positions=rows.positions, locations=rows.locations, slots=rows.slots,
            block_tables=rows.block_tables,
        )  # fmt: skip
        shape, sizes = self._plan.shape, (rows.block_tables.shape[1], rope.shape[1])
        self._launch(
            APPEND, AppendConstants(shape.q_rank, shape.kv_rank, shape.rope_dim), (len(latents), 2), _BLOCK,
            q_latent, pages, latents, weights.q_norm, weights.kv_norm, rope, rows.positions, rows.locations,
            rows.slots, rows.block_tables, *map(np.int32, sizes), np.float32(eps),
        )  # fmt: skip

    def decode_latent_attention(
        self, out: DeviceArray, q: DeviceArray, latents: DeviceArray | None, pages: DeviceArray, weights: LatentWeights,
        rope: DeviceArray, rows: Rows, scale: float, eps: float, upcoming: Weight | None = None,
        q_up: Weight | None = None,
    ) -> None:  # fmt: skip
        """Launch the op `decode_latent_attention`."""
        check_latent_shapes(_DECODE, out, q, pages, weights, rope, rows, latents)
        self._absorb(q, latents, pages, weights, rope, rows, eps, q_up)
        plan, shape, num_rows = self._plan, self._plan.shape, len(q)
        is_tree, fresh = rows.tree_masks is not None, num_rows if latents is not None else 0
        weight = None if upcoming is None else data_of(upcoming)
        early_bytes = min(weight.nbytes, plan.upcoming_bytes) // 16 * 16 if weight is not None else 0
        sizes = fresh, plan.num_splits, rows.block_tables.shape[1], early_bytes
        self._launch(
            plan.attend, LatentConstants(shape.num_heads, shape.kv_rank, shape.rope_dim, plan.stages, is_tree),
            (plan.runs_at_once(num_rows), num_rows, plan.units), _ATTEND_BLOCK, *self._runs, self._queries,
            pages, *plan.boxes(self._launch, pages), rows.positions, rows.slots, rows.block_tables, rows.tree_masks,
            rows.tree_base, weight, *map(np.int32, sizes), np.float32(scale),
            smem=plan.shared_bytes, prefers_shared=True,
        )  # fmt: skip
        self._launch(
            MERGE, MergeConstants(shape.num_heads, shape.kv_rank, shape.nope_dim, shape.value_dim),
            (shape.num_heads, plan.row_blocks(num_rows)), _MERGE_BLOCK, out, *self._runs, weights.up, rows.positions,
            rows.slots, np.int32(num_rows), np.int32(plan.num_splits), prefers_shared=True,
        )  # fmt: skip

    def _absorb(
        self, q: DeviceArray, latents: DeviceArray | None, pages: DeviceArray, weights: LatentWeights,
        rope: DeviceArray, rows: Rows, eps: float, q_up: Weight | None,
    ) -> None:  # fmt: skip
        """Take queries to the space of the latents, and store the rows' own latents in the pages. For a single row this
        is fused with the product `q_up` that makes the queries, where that is packed and planned so."""
        plan, shape, num_rows = self._plan, self._plan.shape, len(q)
        heads = AbsorbConstants(shape.kv_rank, shape.nope_dim, shape.rope_dim, shape.value_dim)
        places = rows.positions, rows.locations, rows.slots, rows.block_tables
        if isinstance(q_up, PackedWeight) and q_up.perm is None and num_rows == 1:
            assert latents is not None, "q_up makes queries of latents"
            pitch = shape.q_rank + shape.cached_dim
            if (made := _plan_heads(q_up.layout, shape.num_heads, plan.device, pitch)) is not None:
                sizes = shape.num_heads, rope.shape[1], rows.block_tables.shape[1]
                self._launch(
                    LATENT_QUERIES, latent_queries(made, **asdict(heads)), shape.num_heads + 1, made.block,
                    self._queries, pages, latents, weights.q_norm, q_up.data, weights.up, rope, weights.kv_norm,
                    *places, *map(np.int32, sizes), np.float32(eps),
                    smem=made.shared_bytes, prefers_shared=True,
                )  # fmt: skip
                return
        if q_up is not None:
            assert self._project is not None and latents is not None, "q_up makes queries of latents, by a product"
            self._project(q, latents, weights.q_norm, q_up, eps)
        counts = shape.num_heads, num_rows, rope.shape[1], shape.q_rank, rows.block_tables.shape[1]
        blocks = shape.num_heads + (latents is not None), plan.row_blocks(num_rows)
        self._launch(
            ABSORB, heads, blocks, _BLOCK, self._queries, pages, q, weights.up, rope, latents, weights.kv_norm, *places,
            *map(np.int32, counts), np.float32(eps), prefers_shared=True,
        )  # fmt: skip

    def prefill_latent_attention(
        self, out: DeviceArray, q: DeviceArray, pages: DeviceArray, weights: LatentWeights, rope: DeviceArray,
        rows: Rows, scale: float,
    ) -> None:  # fmt: skip
        """Launch the op `prefill_latent_attention`."""
        check_latent_shapes(_PREFILL, out, q, pages, weights, rope, rows)
        shape, num_rows = self._plan.shape, len(q)
        constants = ChunkConstants(shape.nope_dim, shape.rope_dim, shape.value_dim)
        queries, attended = self._head_queries[:num_rows], self._head_attention[:num_rows]
        of_expanded = Rows(None, rows.positions, rows.slots, self._tables, True)
        given = Operands(attended, queries, self._expanded, of_expanded, scale)
        for first in range(0, shape.num_heads, self._plan.heads_at_once):
            self._expand(pages, weights, rows, first)
            sizes = tuple(map(np.int32, (num_rows, self._plan.heads_at_once, first, shape.num_heads)))
            self._launch(
                ROTATE_HEADS, constants, self._grid(num_rows, shape.nope_dim // 8 + shape.rope_dim // 16), _BLOCK,
                queries, q, rope, rows.positions, rows.slots, *sizes, np.int32(rope.shape[1]),
            )  # fmt: skip
            attend_chunk(self._launch, self._plan.prefill, given, self._chunk)
            self._launch(
                GATHER_HEADS, constants, self._grid(num_rows, shape.value_dim // 8), _BLOCK, out, attended, *sizes
            )  # fmt: skip

    def _expand(self, pages: DeviceArray, weights: LatentWeights, rows: Rows, first_head: int) -> None:
        """Expand the latents of the chunk's sequence to keys and values of `heads_at_once` heads."""
        plan, shape = self._plan, self._plan.shape
        constants = ExpandLatentsConstants(
            shape.kv_rank, shape.nope_dim, shape.rope_dim, shape.value_dim, shape.query_dim
        )  # fmt: skip
        self._launch(
            EXPAND, constants, (min(plan.num_pages, _MOST_EXPAND_BLOCKS), plan.heads_at_once), _EXPAND_BLOCK,
            self._expanded.k, self._expanded.v, pages, weights.up, rows.block_tables, self._chunk,
            np.int32(first_head), np.int32(rows.block_tables.shape[1]),
            smem=(shape.nope_dim + shape.value_dim + PAGE_SIZE) * shape.kv_rank * 2,
        )  # fmt: skip

    def _grid(self, num_rows: int, threads_per_head: int) -> int:
        return -(-num_rows * self._plan.heads_at_once * threads_per_head // _BLOCK)


def _takes_wgmma(shape: LatentAttention, device: Device) -> bool:
    """Whether there are enough heads for `latent_attention_wgmma.cu` and it takes these sizes."""
    sizes_fit = shape.kv_rank == 256 and shape.rope_dim in (32, 64)
    return device.capability == 90 and sizes_fit and shape.num_heads > QUERY_TILE


def latent_sizes(shape: LatentAttention) -> dict[str, tuple[int, bool, str]]:
    """Return by name, for each size that the kernels restrict: the size, whether they take it, and what they take."""
    query, columns = shape.query_dim, shape.q_rank + shape.cached_dim
    taken = (
        ("q_lora_rank", shape.q_rank, shape.q_rank % 64 == 0, "a multiple of 64"),
        ("kv_lora_rank", shape.kv_rank, shape.kv_rank in (256, 512, 1024), "256, 512 or 1024"),
        ("q_lora_rank + kv_lora_rank + qk_rope_head_dim", columns, columns % 16 == 0, "a multiple of 16"),
        ("qk_nope_head_dim", shape.nope_dim, shape.nope_dim % 16 == 0, "a multiple of 16"),
        ("qk_rope_head_dim", shape.rope_dim, shape.rope_dim % 32 == 0, "a multiple of 32"),
        ("qk_nope_head_dim + qk_rope_head_dim", query, query in (64, 96, 128), "64, 96 or 128"),
        ("v_head_dim", shape.value_dim, shape.value_dim % 32 == 0 and shape.value_dim <= query,
         f"a multiple of 32, at most {query}"),
        ("num_attention_heads * v_head_dim", shape.value_size, shape.value_size % 64 == 0, "a multiple of 64"),
    )  # fmt: skip
    return {name: (size, is_taken, wanted) for name, size, is_taken, wanted in taken}
