"""The memory plan: every byte the executor will use, laid out before anything is allocated.

Weights, tables and KV pages live for ever; workspace buffers share memory where their lifetimes do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from cpmrt.errors import MemoryPlanError
from cpmrt.memory.kv_pages import PAGE_SIZE, KVLayout
from cpmrt.memory.packed_regions import PackedRegions, canonical_regions
from cpmrt.tensor_spec import BufferSpec, TensorSpec

ALIGNMENT = 256
WEIGHT_PARTS = ("embedding", "layers", "lm head", "draft")
WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Region:
    """One named piece of the arena."""

    name: str
    part: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Regions of one arena. `str(plan)` is the table that `cpmrt plan` prints."""

    regions: tuple[Region, ...]
    total_bytes: int
    max_context: int
    max_sequences: int
    kv_bytes_per_token: int
    """Without the scales of pages in fp8."""
    workspace_unshared_bytes: int
    """What the workspace would take without sharing."""
    tensors: tuple[TensorSpec, ...] = ()
    """The weights. A quantised one has several regions, `name.codes`, `name.scales` and so on."""

    def region(self, name: str) -> Region:
        """The region called `name`. Raises KeyError."""
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

    def __str__(self) -> str:
        details = {
            "KV pages": f"{self.max_sequences} x {self.max_context} tokens, {self.kv_bytes_per_token} B a token",
            WORKSPACE: f"peak; {format_bytes(self.workspace_unshared_bytes)} without sharing",
        }
        rows = [(part, format_bytes(size), details.get(part, "")) for part, size in self.part_bytes.items()]
        rows.append(("total", format_bytes(self.total_bytes), ""))
        return "\n".join(f"{part:<15}{size:>12}  {detail}".rstrip() for part, size, detail in rows)


def format_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"


def make_plan(
    tensors: Iterable[TensorSpec],
    tables: Sequence[BufferSpec],
    workspace: Sequence[BufferSpec],
    kv: KVLayout,
    *,
    itemsize: int,
    packed: PackedRegions = canonical_regions,
    draft_kv: KVLayout | None = None,
) -> MemoryPlan:
    """Lay out one arena; `itemsize` = bytes of a stored weight, key, value or activation element.

    `packed` is the executor's layout of quantised weights; `draft_kv` that of a draft's pages, `draft.k_pages` and
    `draft.v_pages`.
    """
    layout, tensors = _Layout(), tuple(tensors)
    for tensor in tensors:
        part = _weight_part(tensor.name)
        if tensor.quant is None:
            layout.add(tensor.name, part, tensor.shape, itemsize)
            continue
        for piece in packed(tensor):
            layout.add(f"{tensor.name}.{piece.name}", part, piece.shape, piece.itemsize or itemsize)
    for table in tables:
        layout.add(table.name, "tables", table.shape, table.itemsize or itemsize)
    for name, shape, nbytes in kv.page_arrays(itemsize):
        layout.add(name, "KV pages", shape, nbytes)
    for name, shape in kv.compressed_shapes.items():
        layout.add(name, "compressed keys", shape, itemsize)
    if draft_kv is not None:
        for name in ("draft.k_pages", "draft.v_pages"):
            layout.add(name, "draft KV", draft_kv.page_shape, itemsize)
    unshared = layout.add_shared(WORKSPACE, workspace, itemsize)
    return MemoryPlan(
        regions=tuple(layout.regions),
        total_bytes=layout.end,
        max_context=kv.max_context,
        max_sequences=kv.max_sequences,
        kv_bytes_per_token=kv.elements_per_token * kv.element_bytes(itemsize),
        workspace_unshared_bytes=unshared,
        tensors=tensors,
    )


def largest_context(build: Callable[[int], MemoryPlan], budget: int, limit: int) -> int:
    """The largest context, in tokens up to `limit`, whose plan fits `budget` bytes; 0 if none does.

    Whole pages, except for `limit` itself.
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


def check_budget(plan: MemoryPlan, budget: int) -> None:
    """Raise MemoryPlanError, with the parts in its message, if the plan does not fit."""
    if plan.total_bytes > budget:
        parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in plan.part_bytes.items())
        raise MemoryPlanError(
            f"the plan for {plan.max_context} tokens of context does not fit ({parts})",
            expected=f"at most {format_bytes(budget)}",
            actual=format_bytes(plan.total_bytes),
            fix="choose a smaller max_context or a larger memory_budget",
        )


class _Layout:
    """Offsets handed out one after the other, each on an ALIGNMENT boundary."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.end = 0

    def add(self, name: str, part: str, shape: tuple[int, ...], itemsize: int) -> None:
        nbytes = prod(shape) * itemsize
        self.regions.append(Region(name, part, self.end, nbytes, shape))
        self.end += _aligned(nbytes)

    def add_shared(self, part: str, buffers: Sequence[BufferSpec], itemsize: int) -> int:
        """Place buffers so that two overlap in memory only if their lifetimes do not; the bytes without sharing.

        Greedy by size: the largest first, each at the lowest offset that is free during its whole life.
        """
        placed: list[tuple[BufferSpec, int, int]] = []
        for buffer in sorted(buffers, key=lambda b: -b.num_elements * (b.itemsize or itemsize)):
            size = _aligned(buffer.num_elements * (buffer.itemsize or itemsize))
            offset = 0
            for other, start, length in sorted(placed, key=lambda entry: entry[1]):
                lifetimes_meet = other.first <= buffer.last and buffer.first <= other.last
                if lifetimes_meet and start < offset + size and offset < start + length:
                    offset = start + length
            placed.append((buffer, offset, size))
        for buffer, offset, _ in placed:
            nbytes = buffer.num_elements * (buffer.itemsize or itemsize)
            self.regions.append(Region(buffer.name, part, self.end + offset, nbytes, buffer.shape))
        self.end += max((offset + size for _, offset, size in placed), default=0)
        return sum(size for _, _, size in placed)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _weight_part(name: str) -> str:
    if name.startswith("draft."):
        return "draft"
    return "layers" if name.startswith("layers.") else "lm head" if name == "lm_head" else "embedding"
