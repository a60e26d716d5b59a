"""The memory plan: every byte the executor will use, laid out before anything is allocated.

Weights, tables and KV pages live for ever; workspace buffers share memory where their lifetimes do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from cpmrt.byte_sizes import format_bytes
from cpmrt.dtypes import ElementType
from cpmrt.errors import MemoryPlanError
from cpmrt.memory.caches import PAGE_SIZE, CacheLayout
from cpmrt.memory.packed_regions import PackedRegions, canonical_regions
from cpmrt.tensor_spec import BufferSpec, TensorSpec

T = TypeVar("T")
ALIGNMENT = 256
WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Region:
    """One named piece of the arena. The executor clears a `zeroed` one before the first step."""

    name: str
    part: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    zeroed: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Regions of one arena. `str(plan)` is the table that `cpmrt plan` prints."""

    regions: tuple[Region, ...]
    total_bytes: int
    max_context: int
    max_sequences: int
    kv_bytes_per_token: int
    """Bytes of keys and values that a token takes, without the scales of pages in fp8."""
    workspace_unshared_bytes: int
    """The bytes that the workspace would take if no two buffers shared memory."""
    caches: CacheLayout
    draft_caches: CacheLayout | None = None
    inner_caches: CacheLayout | None = None
    """The caches of the inner draft, that of a small model that drafts."""
    tensors: tuple[TensorSpec, ...] = ()
    """The weights. A quantised one has several regions, `name.codes`, `name.scales` and so on, a mapped one none."""

    def region(self, name: str) -> Region:
        """Return the region called `name`. Raises KeyError."""
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of each part, shared memory counted once."""
        sizes: dict[str, int] = {}
        for region in self.regions:
            sizes[region.part] = sizes.get(region.part, 0) + _aligned(region.nbytes)
        if WORKSPACE in sizes:
            sizes[WORKSPACE] += self.total_bytes - sum(sizes.values())
        return sizes

    def paged(self, arrays: Mapping[str, T]) -> dict[str, T]:
        """Return the arrays of all pages by name, those of drafts too: [layers, pages, ...]."""
        found = self.caches.paged(arrays)
        for caches in filter(None, (self.draft_caches, self.inner_caches)):
            found |= caches.paged(arrays)
        return found

    def __str__(self) -> str:
        details = {
            "KV pages": f"{self.max_sequences} x {self.max_context} tokens, {self.kv_bytes_per_token} B a token",
            WORKSPACE: f"peak; {format_bytes(self.workspace_unshared_bytes)} without sharing",
        }
        rows = [(part, format_bytes(size), details.get(part, "")) for part, size in self.part_bytes.items()]
        rows.append(("total", format_bytes(self.total_bytes), ""))
        return "\n".join(f"{part:<15}{size:>12}  {detail}".rstrip() for part, size, detail in rows)


def make_plan(
    tensors: Iterable[TensorSpec],
    tables: Sequence[BufferSpec],
    workspace: Sequence[BufferSpec],
    caches: CacheLayout,
    *,
    itemsize: int,
    packed: PackedRegions = canonical_regions,
    draft_caches: CacheLayout | None = None,
    inner_caches: CacheLayout | None = None,
) -> MemoryPlan:
    """Lay out one arena; `itemsize` = bytes of a stored weight, key, value or activation element: 2, held as words of
    16 bits, or 4, held as float32.

    `packed` is the executor's layout of quantised weights; `draft_caches` are those of a draft, `inner_caches` those of
    its inner draft.
    """
    layout, tensors = _Layout(np.dtype(np.uint16 if itemsize == 2 else np.float32)), tuple(tensors)
    for tensor in tensors:
        if tensor.mapped_as is not None:
            continue
        if tensor.quant is None:
            layout.add(tensor.name, tensor.part, tensor.shape)
            continue
        for piece in packed(tensor):
            layout.add(f"{tensor.name}.{piece.name}", tensor.part, piece.shape, piece.dtype)
    for table in tables:
        layout.add(table.name, table.part, table.shape, table.dtype, zeroed=table.zeroed)
    for spec, shape in caches.arrays():
        layout.add(spec.name, spec.part, shape, spec.dtype)
    for name, spec, shape in caches.snapshots():
        layout.add(name, "snapshots", shape, spec.dtype)
    for drafts in filter(None, (draft_caches, inner_caches)):
        for spec, shape in drafts.arrays():
            layout.add(f"{drafts.prefix}{spec.name}", "draft KV", shape, spec.dtype)
    unshared = layout.add_shared(WORKSPACE, workspace)
    return MemoryPlan(
        regions=tuple(layout.regions),
        total_bytes=layout.end,
        max_context=caches.max_context,
        max_sequences=caches.max_sequences,
        kv_bytes_per_token=caches.bytes_per_token(itemsize),
        workspace_unshared_bytes=unshared,
        caches=caches,
        draft_caches=draft_caches,
        inner_caches=inner_caches,
        tensors=tensors,
    )


def largest_context(build: Callable[[int], MemoryPlan], budget: int, limit: int) -> int:
    """Return the largest context, in tokens up to `limit`, whose plan fits `budget` bytes; 0 if none does.

    It is a whole number of pages, unless it is `limit` itself.
    """
    if build(limit).total_bytes <= budget:
        return limit
    low, high = 0, limit // PAGE_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        if build(middle * PAGE_SIZE).total_bytes <= budget:
            low = middle
        else:
            high = middle - 1
    return low * PAGE_SIZE


def check_budget(plan: MemoryPlan, budget: int, fix: Callable[[], str]) -> None:
    """Raise MemoryPlanError, with the parts in its message and what to change (`fix()`), if the plan does not fit."""
    if plan.total_bytes > budget:
        parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in plan.part_bytes.items())
        raise MemoryPlanError(
            f"the plan for {plan.max_context} tokens of context does not fit ({parts})",
            expected=f"at most {format_bytes(budget)}",
            actual=format_bytes(plan.total_bytes),
            fix=fix(),
        )


class _Layout:
    """Hands out offsets, each on an ALIGNMENT boundary. `default` is the type of arrays that are given none."""

    def __init__(self, default: np.dtype[Any]) -> None:
        self.regions: list[Region] = []
        self.end = 0
        self._default = default

    def add(
        self, name: str, part: str, shape: tuple[int, ...], dtype: ElementType | None = None, *, zeroed: bool = False
    ) -> None:
        """Place one array behind those before it."""
        kind = np.dtype(dtype or self._default)
        nbytes = prod(shape) * kind.itemsize
        self.regions.append(Region(name, part, self.end, nbytes, shape, kind, zeroed))
        self.end += _aligned(nbytes)

    def add_shared(self, part: str, buffers: Sequence[BufferSpec]) -> int:
        """Place buffers so that two overlap in memory only if their lifetimes do not; return the bytes without sharing.

        Greedy by size: the largest first, each at the lowest offset that is free during its whole life.
        """
        placed: list[tuple[BufferSpec, int, int]] = []
        for buffer in sorted(buffers, key=lambda buffer: -self._nbytes(buffer)):
            size, offset = _aligned(self._nbytes(buffer)), 0
            for other, start, length in sorted(placed, key=lambda entry: entry[1]):
                lifetimes_meet = other.first <= buffer.last and buffer.first <= other.last
                if lifetimes_meet and start < offset + size and offset < start + length:
                    offset = start + length
            placed.append((buffer, offset, size))
        for buffer, offset, _ in placed:
            kind, nbytes = np.dtype(buffer.dtype or self._default), self._nbytes(buffer)
            place = self.end + offset
            self.regions.append(Region(buffer.name, part, place, nbytes, buffer.shape, kind, buffer.zeroed))
        self.end += max((offset + size for _, offset, size in placed), default=0)
        return sum(size for _, _, size in placed)

    def _nbytes(self, buffer: BufferSpec) -> int:
        return buffer.num_elements * np.dtype(buffer.dtype or self._default).itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
