"""A quantised linear [N, K] in canonical form, rounding to nearest, and the error that a quantisation makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quantization.arrays import module_of
from quantization.grid import Grid, GridSettings, fit_grid


@dataclass(frozen=True)
class QuantisedLinear:
    """W[n, k] = scales[n, group[k]] * (codes[n, k] - zeros[n, group[k]]), columns in the order of the model.

    codes uint8 [N, K]; scales float32 [N, G] and zeros uint8 [N, G]; group int32 [K], which group a column is of.
    """

    codes: Any
    scales: Any
    zeros: Any
    group: Any

    def values(self) -> Any:
        """The weights it stands for, float32 [N, K]."""
        zeros = self.zeros[:, self.group].astype(np.float32)
        return self.scales[:, self.group] * (self.codes.astype(np.float32) - zeros)

    def rows(self, start: int, stop: int) -> QuantisedLinear:
        """Some of its outputs."""
        return QuantisedLinear(self.codes[start:stop], self.scales[start:stop], self.zeros[start:stop], self.group)


def round_to_nearest(weight: Any, settings: GridSettings, importance: Any | None = None) -> QuantisedLinear:
    """Every weight of float32 [N, K] to the nearest code of its group's grid.

    `importance` [K] weighs columns in the search for a grid.
    """
    num_rows, num_columns = weight.shape
    group = settings.group_of(num_columns)
    groups = weight.reshape(num_rows, -1, group)
    weighed = None if importance is None else importance.reshape(-1, group)
    return _pack(groups, fit_grid(groups, settings, weighed), group)


def _pack(groups: Any, grid: Grid, group: int) -> QuantisedLinear:
    xp, num_rows = module_of(groups), len(groups)
    codes = grid.codes(groups).astype(np.uint8).reshape(num_rows, -1)
    zeros = grid.zeros[..., 0].astype(np.uint8)
    return QuantisedLinear(codes, grid.scales[..., 0], zeros, xp.arange(codes.shape[1], dtype=np.int32) // group)


def output_error(weight: Any, approximation: Any, hessian: Any) -> float:
    """Sum over calibration rows x of |W x - W' x|^2, from their `hessian`, the sum of x x^T [K, K]."""
    return _energy(approximation - weight, hessian)


def relative_output_error(weight: Any, approximation: Any, hessian: Any) -> float:
    """The same, as a share of the sum of |W x|^2."""
    return output_error(weight, approximation, hessian) / max(_energy(weight, hessian), 1e-30)


def _energy(weight: Any, hessian: Any) -> float:
    return float(((weight @ hessian) * weight).sum(dtype=np.float64))
