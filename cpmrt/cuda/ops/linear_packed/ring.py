"""How many packed weights a block of a skinny product holds in shared memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.cuda.ops.linear_packed.layout import LINE_BYTES, PackedLayout, whole_lines
from cpmrt.weights.ternary import TERNARY_BITS

MAX_SLOTS = 8
"""Chunks of a warp at most."""
# Bytes at most for one row.
_SINGLE_ROW_RING = 139_264
# Slices of a chunk where one of whole lines would leave room for no other.
_SMALL_CHUNK = 2
# Chunks of whole lines copy faster; in 8 bits they are so large that many rows, or many warps, leave room for one only.
_LARGE_CHUNK_ROWS, _LARGE_CHUNK_WARPS = 16, 16


@dataclass(frozen=True)
class Ring:
    """The weights in a block's shared memory: `slots` chunks a warp would do; `level` bytes for one of every warp."""

    slots: int
    level: int

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, warps: int, rounds: int, *, has_small_chunks: bool = False) -> Ring:
        are_small = layout.bits == 8 and (rows > _LARGE_CHUNK_ROWS or warps > _LARGE_CHUNK_WARPS)
        copied = LINE_BYTES // 2 if are_small else LINE_BYTES
        aligned = next(slices for slices in (1, 2, 4) if slices * layout.unit_bytes % copied == 0)
        has_large = rows == 1 and layout.bits == TERNARY_BITS and warps <= 16 and layout.run_slices % 8 == 0
        together = 8 if has_large else 2 if rows == 16 or layout.bits == 8 else 4 if rows <= 8 else 1
        chunk_slices = min(_SMALL_CHUNK if has_small_chunks else max(aligned, together), layout.run_slices)
        level = warps * whole_lines(chunk_slices * layout.unit_bytes)
        slots = min(MAX_SLOTS, rounds * ceil(layout.run_slices / chunk_slices))
        return cls(slots if rows > 1 else max(1, min(slots, _SINGLE_ROW_RING // level)), level)
