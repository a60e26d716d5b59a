"""Quantised linears as files have them: GPTQ (v1 and v2 zero points) and AutoAWQ GEMM, with their config sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import cpmrt
from cpmrt.dtypes import Array
from cpmrt.errors import ConfigError
from cpmrt.weights.formats import AWQ, GPTQ
from cpmrt.weights.formats.format import Format, Part
from cpmrt.weights.formats.gptq import to_v1
from quantization.arrays import to_host
from quantization.file_writer import TensorPlan
from quantization.linear import QuantisedLinear
from quantization.recipe import Recipe

FORMATS = {"gptq": GPTQ, "gptq_v2": GPTQ, "awq": AWQ}
CODES_A_WORD = 8


def check_format(name: str, recipe: Recipe) -> None:
    """Raises ConfigError where the format cannot say what the recipe makes."""
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


def planned_tensors(name: str, num_rows: int, num_columns: int, num_groups: int) -> dict[str, TensorPlan]:
    """The tensors of one linear [num_rows, num_columns], by suffix."""
    row, sizes = FORMATS[name], (num_rows, num_columns, num_groups)
    parts = (row.codes, "I32"), (_zeros(row), "I32"), (row.scales, "F16")
    plan = {part.suffix: TensorPlan(dtype, part.shape(*sizes)) for part, dtype in parts}
    return plan | ({row.order: TensorPlan("I32", (num_columns,))} if row.order else {})


def packed(name: str, linear: QuantisedLinear) -> dict[str, Array]:
    """The contents of `planned_tensors`."""
    row, scales = FORMATS[name], to_host(linear.scales).astype(np.float16)
    zeros = _zeros(row).pack(to_host(linear.zeros))
    tensors = {
        row.codes.suffix: row.codes.pack(to_host(linear.codes)),
        _zeros(row).suffix: to_v1(zeros) if name == "gptq" else zeros,
        row.scales.suffix: row.scales.pack(scales),
    }
    return tensors | ({row.order: to_host(linear.group)} if row.order else {})


def _zeros(row: Format) -> Part:
    assert row.zeros is not None, row.name
    return row.zeros


def quantization_config(name: str, recipe: Recipe) -> Mapping[str, Any]:
    """The `quantization_config` of config.json, as GPTQModel, AutoAWQ, transformers and vLLM read it."""
    if name == "awq":
        return {
            "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": recipe.grid.group_size,
            "zero_point": True, "modules_to_not_convert": None,
        }  # fmt: skip
    is_gptq = recipe.method == "gptq"
    has_order = is_gptq and recipe.gptq.act_order
    return {
        "quant_method": "gptq", "checkpoint_format": name, "bits": 4, "group_size": recipe.grid.group_size,
        "sym": recipe.grid.symmetric, "desc_act": has_order and not recipe.gptq.static_groups,
        "static_groups": is_gptq and recipe.gptq.static_groups, "true_sequential": True, "lm_head": recipe.lm_head,
        "damp_percent": recipe.gptq.damping, "pack_dtype": "int32",
        "meta": {"quantizer": [f"cpmrt:{cpmrt.__version__}"], "method": recipe.method},
    }  # fmt: skip
