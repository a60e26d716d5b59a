"""A quantised weight, as it reaches the ops in place of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, eq=False, slots=True)
class QuantizedWeight:
    """A matrix [N, K] as codes and scales; the arrays are of the executor's own kind and layout.

    W[n, perm[k]] = scales[n, k // group_size] * (codes[n, k] - zeros[n, k // group_size]). Codes are 0..15; `zeros`
    None: 8 everywhere; `perm` None: k itself. With `bits` 8 codes are -127..127 and the zero point is 0.
    """

    codes: Any
    scales: Any
    zeros: Any | None
    perm: Any | None
    shape: tuple[int, int]
    group_size: int
    bits: int = 4

    @property
    def size(self) -> int:
        """Elements of the matrix."""
        return prod(self.shape)
