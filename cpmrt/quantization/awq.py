"""AWQ (Lin et al. 2023, arXiv 2306.00978): columns with large inputs are scaled up before rounding, the inputs down.

The inverse scales of the inputs cost nothing at run time: they are folded into the norm that makes the inputs, or into
the rows of the linear that does (up_proj for down_proj). o_proj is left as it is: under grouped-query attention its
inputs share rows of v_proj.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cpmrt.dtypes import DType
from cpmrt.quantization.arrays import round_to
from cpmrt.quantization.calibration import InputSums
from cpmrt.quantization.decoder_layer import DOWN, GATE_UP, NORM_OF, QKV, STAGES, DecoderLayer
from cpmrt.quantization.grid import GridSettings, output_error, round_to_nearest

EXPONENTS = np.linspace(0, 1, 21)[:-1].astype(np.float32)
SCALED_STAGES = (QKV, GATE_UP, DOWN)


def column_scales(weights: Sequence[Any], sums: InputSums, grid: GridSettings) -> Any:
    """Return scales float32 [K] for the columns of `weights` [N, K], which share their inputs: a power of mean |x|.

    The power is the one with the least output error after rounding to nearest on grids without a search; 0, no scaling,
    is tried too.
    """
    grid = replace(grid, search=False)
    mean = np.maximum(sums.magnitude / np.float32(sums.num_rows), np.float32(1e-4))
    best_error, best = np.inf, np.ones_like(mean)
    for exponent in EXPONENTS:
        scales = mean**exponent
        scales = scales / np.sqrt(scales.max() * scales.min())
        error = 0.0
        for weight in weights:
            rounded = round_to_nearest(weight * scales, grid).values() / scales
            error += output_error(weight, rounded, sums.hessian)
        if error < best_error:
            best_error, best = error, scales
    return best


def fold_scales(layer: DecoderLayer, stage: int, scales: Any, dtype: DType) -> None:
    """Multiply the columns of a stage's linears by `scales` and divide the norm or the rows of up_proj before them by
    the same: the layer computes what it did.

    A norm's new weights are rounded to `dtype`, in which they will be stored; the columns are multiplied by the ratio
    of its old to its rounded new weights, which makes up for the rounding.
    """
    if stage in NORM_OF:
        norm = layer.tensors[NORM_OF[stage]]
        folded = round_to(norm / scales, dtype)
        usable = folded != 0
        layer.tensors[NORM_OF[stage]] = np.where(usable, folded, norm)
        scales = np.where(usable, norm / np.where(usable, folded, np.float32(1)), np.float32(1))
    else:
        layer.tensors["mlp.up_proj.weight"] = layer.weight("mlp.up_proj") / scales[:, None]
    for linear in STAGES[stage]:
        layer.tensors[linear + ".weight"] = layer.weight(linear) * scales
