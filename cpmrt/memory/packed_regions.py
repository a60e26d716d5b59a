"""The pieces of memory that a quantised weight takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cpmrt.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class PackedRegion:
    """One piece, `layers.0.qkv.<name>`; `itemsize` None means the size of a stored element (scales)."""

    name: str
    shape: tuple[int, ...]
    itemsize: int | None


PackedRegions = Callable[[TensorSpec], tuple[PackedRegion, ...]]
"""What an executor's layout needs for a spec with a `quant`."""


def canonical_regions(spec: TensorSpec) -> tuple[PackedRegion, ...]:
    """The layout of the NumPy executor: codes packed along K, a byte for each zero point."""
    quant, (num_rows, num_columns) = spec.quant, spec.shape
    assert quant is not None, spec.name
    num_groups = num_columns // quant.group_size
    regions = [
        PackedRegion("codes", (num_rows, num_columns * quant.bits // 8), 1),
        PackedRegion("scales", (num_rows, num_groups), None),
    ]
    if not quant.symmetric:
        regions.append(PackedRegion("zeros", (num_rows, num_groups), 1))
    if quant.permuted:
        regions.append(PackedRegion("perm", (num_columns,), 4))
    return tuple(regions)
