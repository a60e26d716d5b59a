"""Turns quantised linears into the tensors and the config section of a file format (`cpmrt.weights.formats`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import cpmrt
from cpmrt.dtypes import Array
from cpmrt.errors import ConfigError
from cpmrt.quantization.arrays import to_host
from cpmrt.quantization.file_writer import TensorPlan
from cpmrt.quantization.grid import QuantisedLinear
from cpmrt.quantization.recipe import Recipe
from cpmrt.weights.formats.awq import AWQ
from cpmrt.weights.formats.format import Format
from cpmrt.weights.formats.gptq import GPTQ, GPTQ_HEAD, HEAD, to_v1
from cpmrt.weights.formats.marlin import MARLIN

FORMATS = ("gptq", "gptq_v2", "awq")
"""The formats that a model can be quantised to; gptq stores zero points minus one, gptq_v2 as they are."""
_ROWS = {"gptq": GPTQ, "gptq_v2": GPTQ, "awq": AWQ, "marlin": MARLIN}
CODES_A_WORD = 8


def check_format(name: str, recipe: Recipe) -> None:
    """Raise ConfigError where the format cannot hold what the recipe makes."""
    if name == "gptq" and not recipe.grid.symmetric and recipe.grid.min_zero < 1:
        raise ConfigError("format gptq stores zero points less one", expected="zero points of at least 1")
    if name != "awq":
        return
    if recipe.lm_head:
        raise ConfigError("format awq keeps the head in 16 bits", fix="leave --lm-head out, or use --format gptq")
    if recipe.grid.symmetric:
        raise ConfigError("format awq has zero points", expected="--asymmetric with --format awq")
    if recipe.gptq.act_order and not recipe.gptq.static_groups:
        raise ConfigError(
            "format awq has no g_idx, which --act-order needs", fix="add --static-groups, or use --format gptq"
        )


def _row(name: str, bits: int) -> Format:
    """Return the row of a format for codes of `bits` bits: 8 only in an output head, which only GPTQ formats have."""
    return GPTQ_HEAD if bits == 8 else _ROWS[name]


def planned_tensors(
    name: str, num_rows: int, num_columns: int, num_groups: int, scale_dtype: str = "F16", bits: int = 4
) -> dict[str, TensorPlan]:
    """Return the plans of the tensors of one linear [num_rows, num_columns], by suffix."""
    row, sizes = _row(name, bits), (num_rows, num_columns, num_groups)
    plans = {row.codes.suffix: TensorPlan("I32", row.codes.shape(*sizes))}
    if row.zeros:
        plans[row.zeros.suffix] = TensorPlan("I32", row.zeros.shape(*sizes))
    if row.order:
        plans[row.order] = TensorPlan("I32", (num_columns,))
    return plans | {row.scales.suffix: TensorPlan(scale_dtype, row.scales.shape(*sizes))}


def packed(name: str, linear: QuantisedLinear, bits: int = 4) -> dict[str, Array]:
    """Return the tensors of `planned_tensors` for a linear, with scales in float16."""
    return words_of(name, replace(linear, scales=linear.scales.astype(np.float16)), bits)


def words_of(name: str, linear: QuantisedLinear, bits: int = 4) -> dict[str, Array]:
    """Return the tensors of `planned_tensors` for a linear, with scales of the type that they have."""
    row = _row(name, bits)
    tensors = {row.codes.suffix: row.codes.pack(to_host(linear.codes))}
    if row.zeros:
        zeros = row.zeros.pack(to_host(linear.zeros))
        tensors[row.zeros.suffix] = to_v1(zeros, bits) if name == "gptq" else zeros
    if row.order:
        tensors[row.order] = to_host(linear.group)
    return tensors | {row.scales.suffix: row.scales.pack(to_host(linear.scales))}


def quantization_config(name: str, recipe: Recipe) -> Mapping[str, Any]:
    """Return the `quantization_config` of config.json, as GPTQModel, AutoAWQ, transformers and vLLM read it."""
    if name == "awq":
        return {
            "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": recipe.grid.group_size,
            "zero_point": True, "modules_to_not_convert": None,
        }  # fmt: skip
    is_gptq = recipe.method == "gptq"
    has_order = is_gptq and recipe.gptq.act_order
    head = {"bits": 8, "group_size": recipe.grid.group_size, "sym": True, "desc_act": False}
    rules = {"dynamic": {HEAD: head}} if recipe.lm_head == 8 else {}
    return {
        "quant_method": "gptq", "checkpoint_format": name, "bits": 4, "group_size": recipe.grid.group_size,
        "sym": recipe.grid.symmetric, "desc_act": has_order and not recipe.gptq.static_groups,
        "static_groups": is_gptq and recipe.gptq.static_groups, "true_sequential": True, "lm_head": recipe.lm_head > 0,
        "damp_percent": recipe.gptq.damping, "pack_dtype": "int32",
        "meta": {"quantizer": [f"cpmrt:{cpmrt.__version__}"], "method": recipe.method}, **rules,
    }  # fmt: skip
