"""The 4-bit grid of a group of weights (scale and zero point), and a linear rounded to such grids.

A weight is scale * (u - zero) with u in 0..15, as in every file format; symmetric grids have zero 8. Groups lie along
the input features. Scales are found in float32 and rounded before any code is chosen, so nothing is rounded after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpmrt.dtypes import DType
from cpmrt.quantization.arrays import module_of, round_to

MAX_CODE = 15
MIDDLE = 8
BYTE_MIDDLE = 128
"""The zero point of codes of 8 bits."""
# The factors of a group's plain range that a search for the best grid tries, all of them.
_SEARCH_STEPS = np.linspace(0.5, 1.1, 31).astype(np.float32)
_SMALLEST_SCALE = np.float32(2.0**-24)


@dataclass(frozen=True)
class GridSettings:
    """Settings for how groups get their grids.

    `group_size` input features share a grid (-1: all of a row). `search` tries ranges around the plain one and keeps
    that of the least squared error. `min_zero` is the lowest zero point: 1 for files that store zero - 1, in which a
    zero point of 0 has no agreed form.
    """

    group_size: int = 128
    symmetric: bool = True
    search: bool = True
    min_zero: int = 0
    dtype: DType = DType.BFLOAT16

    def group_of(self, num_columns: int) -> int:
        """Return the number of input features in a group of a matrix with `num_columns` input features."""
        return num_columns if self.group_size == -1 else self.group_size


@dataclass(frozen=True)
class Grid:
    """Scales and zero points of some groups: float32, of one shape, zero points whole numbers 0..15."""

    scales: Any
    zeros: Any

    def at(self, index: int) -> Grid:
        """Return the grids at an index of the first axis."""
        return Grid(self.scales[index], self.zeros[index])

    def codes(self, weights: Any) -> Any:
        """Return the nearest codes, float32 in 0..15, of weights that broadcast with the grid."""
        return np.clip(np.rint(weights / self.scales) + self.zeros, 0, MAX_CODE)

    def values(self, codes: Any) -> Any:
        """Return the weights of codes, float32."""
        return self.scales * (codes - self.zeros)


def fit_grid(groups: Any, settings: GridSettings, importance: Any | None = None) -> Grid:
    """Choose the grid of each group: `groups` float32 [..., group] gives scales and zeros [..., 1].

    `importance`, broadcastable to `groups`, weighs the squared errors of a search (default: all alike).
    """
    smallest, largest = _range(groups, settings)
    grid = _grid(smallest, largest, settings)
    if not settings.search:
        return grid
    best = _error(groups, grid, importance)
    scales, zeros = grid.scales, grid.zeros
    for step in _SEARCH_STEPS:
        tried = _grid(step * smallest, step * largest, settings)
        error = _error(groups, tried, importance)
        is_better = error < best
        best = np.where(is_better, error, best)
        scales = np.where(is_better, tried.scales, scales)
        zeros = np.where(is_better, tried.zeros, zeros)
    return Grid(scales, zeros)


def round_scales(scales: Any, dtype: DType) -> Any:
    """Round scales to float32 values that both float16 and `dtype` hold, but never to zero.

    Files keep scales as float16, which every reader expects; a model in bfloat16 then uses them unchanged.
    """
    rounded = round_to(scales.astype(np.float16).astype(np.float32), dtype)
    return np.maximum(rounded, _SMALLEST_SCALE)


def _range(groups: Any, settings: GridSettings) -> tuple[Any, Any]:
    """Return the ends of each group's plain range, [..., 1] each; the range always contains 0."""
    if settings.symmetric:
        largest = np.abs(groups).max(axis=-1, keepdims=True)
        return -largest, largest
    largest = np.maximum(groups.max(axis=-1, keepdims=True), 0)
    smallest = np.minimum(groups.min(axis=-1, keepdims=True), 0)
    # With this the zero point of a group without negative weights is min_zero, and no code is lost.
    return np.minimum(smallest, -largest * np.float32(settings.min_zero / (MAX_CODE - settings.min_zero))), largest


def _grid(smallest: Any, largest: Any, settings: GridSettings) -> Grid:
    spread = (largest - smallest) * np.float32(1 / MAX_CODE)
    scales = round_scales(np.where(spread > 0, spread, np.float32(1)), settings.dtype)
    if settings.symmetric:
        return Grid(scales, module_of(scales).full_like(scales, MIDDLE))
    return Grid(scales, np.clip(np.rint(-smallest / scales), settings.min_zero, MAX_CODE))


def _error(groups: Any, grid: Grid, importance: Any | None) -> Any:
    squared = np.square(grid.values(grid.codes(groups)) - groups)
    return (squared if importance is None else squared * importance).sum(axis=-1, keepdims=True)


@dataclass(frozen=True)
class QuantisedLinear:
    """A quantised matrix: W[n, k] = scales[n, group[k]] * (codes[n, k] - zeros[n, group[k]]), columns as in the model.

    codes uint8 [N, K], of 4 bits or 8; scales float32 [N, G] and zeros uint8 [N, G]; group int32 [K], the group of each
    column.
    """

    codes: Any
    scales: Any
    zeros: Any
    group: Any

    def values(self) -> Any:
        """Return the dequantised weights, float32 [N, K]."""
        zeros = self.zeros[:, self.group].astype(np.float32)
        return self.scales[:, self.group] * (self.codes.astype(np.float32) - zeros)

    def rows(self, start: int, stop: int) -> QuantisedLinear:
        """Return the matrix of the rows (output features) from `start` to `stop`."""
        return QuantisedLinear(self.codes[start:stop], self.scales[start:stop], self.zeros[start:stop], self.group)


def round_to_nearest(weight: Any, settings: GridSettings, importance: Any | None = None) -> QuantisedLinear:
    """Round every weight of float32 [N, K] to the nearest code of its group's grid.

    `importance` [K] weighs columns in the search for a grid.
    """
    num_rows, num_columns = weight.shape
    group = settings.group_of(num_columns)
    groups = weight.reshape(num_rows, -1, group)
    weighed = None if importance is None else importance.reshape(-1, group)
    grid = fit_grid(groups, settings, weighed)
    codes = grid.codes(groups).astype(np.uint8).reshape(num_rows, -1)
    group_of = module_of(weight).arange(num_columns, dtype=np.int32) // group
    return QuantisedLinear(codes, grid.scales[..., 0], grid.zeros[..., 0].astype(np.uint8), group_of)


def round_to_bytes(weight: Any, settings: GridSettings) -> QuantisedLinear:
    """Round every weight of float32 [N, K] to the nearest 8-bit code: the largest magnitude of a group becomes 127.

    Codes are 1 to 255 around a zero point of 128; `settings` give the groups and the type of the scales only.
    """
    num_rows, num_columns = weight.shape
    group = settings.group_of(num_columns)
    groups = weight.reshape(num_rows, -1, group)
    scales = round_scales(np.abs(groups).max(axis=-1, keepdims=True) / np.float32(BYTE_MIDDLE - 1), settings.dtype)
    nearest = np.clip(np.rint(groups / scales), 1 - BYTE_MIDDLE, BYTE_MIDDLE - 1) + BYTE_MIDDLE
    xp = module_of(weight)
    zeros = xp.full(scales.shape[:2], BYTE_MIDDLE, dtype=np.uint8)
    group_of = xp.arange(num_columns, dtype=np.int32) // group
    return QuantisedLinear(nearest.astype(np.uint8).reshape(num_rows, -1), scales[..., 0], zeros, group_of)


def output_error(weight: Any, approximation: Any, hessian: Any) -> float:
    """Compute the sum over calibration rows x of |W x - W' x|^2; `hessian` [K, K] is the sum of their x x^T."""
    return _energy(approximation - weight, hessian)


def relative_output_error(weight: Any, approximation: Any, hessian: Any) -> float:
    """Compute the output error as a share of the sum of |W x|^2."""
    return output_error(weight, approximation, hessian) / max(_energy(weight, hessian), 1e-30)


def _energy(weight: Any, hessian: Any) -> float:
    return float(((weight @ hessian) * weight).sum(dtype=np.float64))
