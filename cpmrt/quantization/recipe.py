"""Quantises the linears of one decoder layer, in the order in which they run, or the output head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cpmrt.errors import CheckpointError
from cpmrt.quantization.arrays import module_of
from cpmrt.quantization.awq import SCALED_STAGES, column_scales, fold_scales
from cpmrt.quantization.calibration import InputSums
from cpmrt.quantization.decoder_layer import DOWN, OUTPUT, STAGES, DecoderLayer
from cpmrt.quantization.gptq import GptqSettings, gptq
from cpmrt.quantization.grid import (
    GridSettings,
    QuantisedLinear,
    relative_output_error,
    round_to_bytes,
    round_to_nearest,
)
from cpmrt.weights.formats.gptq import HEAD

METHODS = ("rtn", "gptq", "awq")
_LARGEST_WEIGHT = 1e5
"""A weight of this magnitude or more is an error: scales in float16 could still hold it, but no real weight comes near.
"""


@dataclass(frozen=True)
class Recipe:
    """A method of `METHODS` and its settings; the first `skip_positions` of every calibration window do not count.

    The first positions of a text draw attention from everywhere and can have huge activations, which is why MiniCPM4's
    own quantisation leaves some out (arXiv 2506.07900). The bundled model is better with all of them. `lm_head` is the
    bits of the output head's codes, 4 or 8; 0 leaves it as it is.
    """

    method: str
    grid: GridSettings
    gptq: GptqSettings = field(default_factory=GptqSettings)
    skip_positions: int = 0
    lm_head: int = 0

    @property
    def needs_calibration(self) -> bool:
        return self.method != "rtn"


@dataclass(frozen=True)
class QuantisedLayer:
    """Quantised linears by short name, and after calibration the squared error of each as a share of its outputs'."""

    linears: Mapping[str, QuantisedLinear]
    errors: Mapping[str, float]


def quantise_layer(layer: DecoderLayer, streams: list[Any], recipe: Recipe) -> QuantisedLayer:
    """Quantise every linear of `layer`, whose weights become the quantised ones.

    `streams` are the residual streams [T, C] of the calibration windows as they enter the layer; they are replaced by
    those that leave the quantised layer. The list is empty without calibration. Every linear is calibrated on inputs
    that the linears before it, already quantised, have made. Raises CheckpointError.
    """
    if recipe.method == "awq":
        _scale_columns(layer, streams, recipe)
    linears: dict[str, QuantisedLinear] = {}
    errors: dict[str, float] = {}
    for stage, names in enumerate(STAGES):
        sums = _input_sums(layer, stage, streams, recipe) if recipe.needs_calibration else None
        done = quantise_together({name: layer.weight(name) for name in names}, sums, recipe)
        linears |= done.linears
        errors |= done.errors
        for name in names:
            layer.tensors[name + ".weight"] = linears[name].values()
        if stage in (OUTPUT, DOWN):
            streams[:] = [layer.after(stage, stream) for stream in streams]
    return QuantisedLayer(linears, errors)


def quantise_together(weights: Mapping[str, Any], sums: InputSums | None, recipe: Recipe) -> QuantisedLayer:
    """Quantise linears [N, K] that share an input as one matrix, so that they share the order of columns too.

    Without `sums` weights are rounded to nearest. Raises CheckpointError.
    """
    for name, weight in weights.items():
        check_finite(f"{name}.weight", weight)
    stacked = module_of(weight).concatenate(list(weights.values()))
    if recipe.method == "gptq" and sums is not None:
        whole = gptq(stacked, sums.hessian, recipe.grid, recipe.gptq)
    else:
        whole = round_to_nearest(stacked, recipe.grid, None if sums is None else sums.hessian.diagonal())
    linears: dict[str, QuantisedLinear] = {}
    errors: dict[str, float] = {}
    start = 0
    for name, weight in weights.items():
        linears[name] = whole.rows(start, start + len(weight))
        start += len(weight)
        if sums is not None:
            errors[name] = relative_output_error(weight, linears[name].values(), sums.hessian)
    return QuantisedLayer(linears, errors)


def quantise_head(weight: Any, sums: InputSums | None, recipe: Recipe) -> QuantisedLayer:
    """Quantise the output head: in 4 bits by the recipe's method, in 8 to nearest, where no method gains anything.

    Raises CheckpointError.
    """
    if recipe.lm_head == 4:
        return quantise_together({HEAD: weight}, sums, recipe)
    check_finite(f"{HEAD}.weight", weight)
    linear = round_to_bytes(weight, recipe.grid)
    errors = {} if sums is None else {HEAD: relative_output_error(weight, linear.values(), sums.hessian)}
    return QuantisedLayer({HEAD: linear}, errors)


def _scale_columns(layer: DecoderLayer, streams: list[Any], recipe: Recipe) -> None:
    """Scale the columns of a layer's linears as AWQ does, which leaves what the layer computes unchanged.

    The residual streams computed before any scaling therefore serve all stages.
    """
    grid, after_attention = recipe.grid, [layer.after(OUTPUT, stream) for stream in streams]
    for stage in SCALED_STAGES:
        sums = _input_sums(layer, stage, streams if stage < OUTPUT else after_attention, recipe)
        weights = [layer.weight(name) for name in STAGES[stage]]
        fold_scales(layer, stage, column_scales(weights, sums, grid), grid.dtype)


def _input_sums(layer: DecoderLayer, stage: int, streams: list[Any], recipe: Recipe) -> InputSums:
    return InputSums.over((layer.inputs(stage, stream) for stream in streams), recipe.skip_positions)


def check_finite(name: str, weight: Any) -> None:
    """Raise CheckpointError unless all values of the tensor `name` are finite and below `_LARGEST_WEIGHT`."""
    largest = float(np.abs(weight).max())
    if not largest < _LARGEST_WEIGHT:
        raise CheckpointError(name, expected=f"finite weights below {_LARGEST_WEIGHT:g}", actual=largest)
