"""The pieces of memory that a quantised weight takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cpmrt.dtypes import ElementType
from cpmrt.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class PackedRegion:
    """One piece, in the plan `layers.0.qkv.<name>`; `dtype` None means the type of a stored element (scales)."""

    name: str
    shape: tuple[int, ...]
    dtype: ElementType | None


PackedRegions = Callable[[TensorSpec], tuple[PackedRegion, ...]]
"""A function that returns the pieces which an executor's layout needs for a spec with a `quant`."""


def canonical_regions(spec: TensorSpec) -> tuple[PackedRegion, ...]:
    """Return the pieces of the NumPy executor's layout. A weight in GGUF blocks has the blocks of each source; any
    other has codes packed along K, scales, a byte for each zero point, and the order of the columns."""
    quant, (num_rows, num_columns) = spec.quant, spec.shape
    assert quant is not None, spec.name
    if quant.in_blocks:
        sizes = [(source.shape[0], source.packing.row_bytes) for source in spec.sources if source.packing]
        return tuple(PackedRegion(f"blocks{index}", size, np.uint8) for index, size in enumerate(sizes))
    num_groups, code = num_columns // quant.group_size, np.int8 if quant.bits == 8 else np.uint8
    regions = [
        PackedRegion("codes", (num_rows, num_columns * quant.bits // 8), code),
        PackedRegion("scales", (num_rows, num_groups), None),
    ]
    if not quant.symmetric:
        regions.append(PackedRegion("zeros", (num_rows, num_groups), np.uint8))
    if quant.permuted:
        regions.append(PackedRegion("perm", (num_columns,), np.int32))
    return tuple(regions)
