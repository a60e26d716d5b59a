"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): chooses codes column by column, moving errors to the later columns.

With H the sum of x x^T over calibration inputs and U the upper Cholesky factor of its inverse, rounding column j by
error e costs least when every later column k is changed by -e / U[j, j] * U[j, k].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpmrt.errors import CheckpointError
from cpmrt.quantization.arrays import module_of
from cpmrt.quantization.grid import Grid, GridSettings, QuantisedLinear, fit_grid

BLOCK = 128


@dataclass(frozen=True)
class GptqSettings:
    """Settings of GPTQ. `damping`, as a share of the Hessian's mean diagonal, is added to its diagonal.

    With `act_order` columns are quantised, and grouped too (g_idx), by falling mean square of their inputs. With
    `static_groups` groups stay neighbouring columns, and their grids are fitted to the original weights.
    """

    damping: float = 0.01
    act_order: bool = False
    static_groups: bool = False


def gptq(weight: Any, hessian: Any, grid: GridSettings, settings: GptqSettings) -> QuantisedLinear:
    """Quantise float32 [N, K] given the sum of x x^T [K, K] over its inputs. Raises CheckpointError."""
    xp, num_columns = module_of(weight), weight.shape[1]
    group = grid.group_of(num_columns)
    diagonal = hessian.diagonal()
    order = xp.argsort(-diagonal) if settings.act_order else xp.arange(num_columns)
    rows = xp.ascontiguousarray(weight.T[order])
    factor = inverse_factor(hessian[order][:, order], settings.damping)
    if settings.static_groups:
        column_group = order // group
        fixed = fit_grid(weight.reshape(len(weight), -1, group), grid, diagonal.reshape(-1, group))
        scales, zeros = fixed.scales[..., 0].T, fixed.zeros[..., 0].T
        of_column = Grid(scales[column_group], zeros[column_group])
        codes = _quantise_columns(rows, factor, lambda column, _: of_column.at(column))
    else:
        column_group, made, importance = xp.arange(num_columns) // group, list[Grid](), diagonal[order]

        def grid_at(column: int, remaining: Any) -> Grid:
            if column % group == 0:
                fitted = fit_grid(remaining[:group].T, grid, importance[column : column + group])
                made.append(Grid(fitted.scales[:, 0], fitted.zeros[:, 0]))
            return made[-1]

        codes = _quantise_columns(rows, factor, grid_at)
        scales, zeros = xp.stack([one.scales for one in made]), xp.stack([one.zeros for one in made])
    inverse = xp.argsort(order)
    contiguous = xp.ascontiguousarray
    return QuantisedLinear(
        contiguous(codes[inverse].T), contiguous(scales.T), contiguous(zeros.T.astype(np.uint8)),
        column_group[inverse].astype(np.int32),
    )  # fmt: skip


def inverse_factor(hessian: Any, damping: float) -> Any:
    """Compute U float32 [K, K], upper, with U^T U the inverse of the damped Hessian.

    It comes from the Cholesky factor of the reversed matrix, which takes one triangular inverse and none of H itself.
    An input feature that is always 0 gets the mean diagonal, so that its column is rounded to nearest.
    """
    xp = module_of(hessian)
    damped = hessian.astype(np.float64)
    diagonal = damped.diagonal().copy()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = mean
    index = xp.arange(len(damped))
    damped[index, index] = diagonal + damping * mean
    try:
        lower = xp.linalg.cholesky(damped[::-1, ::-1])
    except np.linalg.LinAlgError as error:
        raise _not_positive() from error
    if not bool(xp.isfinite(lower).all()):
        raise _not_positive()
    return xp.triu(xp.linalg.inv(lower)[::-1, ::-1]).astype(np.float32)


def _not_positive() -> CheckpointError:
    return CheckpointError(
        "the Hessian of a linear's calibration inputs is not positive definite",
        fix="use more calibration text or a larger --damping; inputs that are not finite mean broken weights",
    )


def _quantise_columns(rows: Any, factor: Any, grid_at: Callable[[int, Any], Grid]) -> Any:
    """Choose codes uint8 [K, N] for the transposed weights `rows` [K, N], which are overwritten.

    `grid_at(column, remaining)` returns the grid of a column; `remaining` [.., N] are the weights of this and all later
    columns as the errors moved so far have left them. A column's error is moved to the columns of its own block at
    once, and to all later ones when the block is done, in one large product.
    """
    xp, num_columns = module_of(rows), len(rows)
    codes = xp.empty(rows.shape, np.uint8)
    for start in range(0, num_columns, BLOCK):
        stop = min(start + BLOCK, num_columns)
        errors = xp.empty((stop - start, rows.shape[1]), np.float32)
        for column in range(start, stop):
            grid = grid_at(column, rows[column:])
            chosen = grid.codes(rows[column])
            codes[column] = chosen
            error = (rows[column] - grid.values(chosen)) / factor[column, column]
            rows[column + 1 : stop] -= factor[column, column + 1 : stop, None] * error
            errors[column - start] = error
        rows[stop:] -= factor[start:stop, stop:].T @ errors
    return codes
