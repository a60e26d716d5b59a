"""The ring of packed weights that a block of a skinny product has in shared memory: its size, and who copies."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.linear import LARGE_SHARED_BYTES, STARTS_EARLY
from cpmrt.cuda.ops.linear_packed.layout import LINE_BYTES, RUNS, PackedLayout, whole_lines
from cpmrt.weights.ternary import TERNARY_BITS

MAX_SLOTS = 8
"""The most chunks of a warp in the ring."""
# The most bytes of the ring for one row.
_SINGLE_ROW_RING = 139_264
# Chunks of whole lines copy faster; in 8 bits they are so large that many rows, or many warps, leave room for one only.
_LARGE_CHUNK_ROWS, _LARGE_CHUNK_WARPS = 16, 16
# The width of a model, and the bits of its weights, in which one copy brings a tile of gate_up (`copies_tiles`).
_TILE_WIDTH, _TILE_BITS = 2048, 4


@dataclass(frozen=True)
class Ring:
    """A block's ring of weights: `slots` chunks of a warp are enough; `level` bytes hold one chunk of every warp."""

    slots: int
    level: int

    @classmethod
    def of(cls, layout: PackedLayout, rows: int, warps: int, rounds: int, *, small_chunk: int = 0) -> Ring:
        are_small = layout.bits == 8 and (rows > _LARGE_CHUNK_ROWS or warps > _LARGE_CHUNK_WARPS)
        copied = LINE_BYTES // 2 if are_small else LINE_BYTES
        aligned = next(slices for slices in (1, 2, 4) if slices * layout.unit_bytes % copied == 0)
        has_large = rows == 1 and layout.bits == TERNARY_BITS and warps <= 16 and layout.run_slices % 8 == 0
        together = 8 if has_large else 2 if rows == 16 or layout.bits == 8 else 4 if rows <= 8 else 1
        chunk_slices = min(small_chunk or max(aligned, together), layout.run_slices)
        level = warps * whole_lines(chunk_slices * layout.unit_bytes)
        slots = min(MAX_SLOTS, rounds * ceil(layout.run_slices / chunk_slices))
        return cls(slots if rows > 1 else max(1, min(slots, _SINGLE_ROW_RING // level)), level)

    def copies_tiles(self, layout: PackedLayout, kept_rounds: int, device: Device) -> bool:
        """Tell whether one copy brings the chunks of all eight warps of a tile, in each of `kept_rounds` rounds.

        Fewer and larger copies of the same bytes arrive sooner. It pays where a block asks for all its weights before
        x and still waits for them: gate_up of MiniCPM5-2B in 4 bits (1.3 %). Its other products, and those of wider
        and narrower models, changed by less than 0.3 %.
        """
        is_measured = layout.product == "gate_up" and (layout.in_features, layout.bits) == (_TILE_WIDTH, _TILE_BITS)
        has_all = layout.runs == RUNS and 1 < kept_rounds == self.slots
        has_engine = device.capability >= STARTS_EARLY and device.shared_bytes_per_block >= LARGE_SHARED_BYTES
        return is_measured and has_all and has_engine
