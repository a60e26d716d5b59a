"""Reads the golden files and opens their models on the reference executor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from reference.tiny_models import GOLDEN, make_executor, random_weights

from cpmrt.config import ModelConfig
from cpmrt.dtypes import DType
from cpmrt.executor import Executor
from cpmrt.models.decoder import tensor_specs

TINY = (
    "llama", "llama_class_defaults", "llama_tied", "llama_bias", "llama_head_dim", "rope_llama3", "rope_linear",
    "rope_dynamic_native", "rope_dynamic_stretched", "rope_yarn", "rope_yarn_mscale", "rope_longrope_short",
    "rope_longrope_long", "qwen2", "qwen2_tied", "qwen3", "minicpm", "minicpm_tied", "minicpm_longrope",
    "minicpm_longrope_extended", "minicpm_moe", "minicpm_moe_tied", "minicpm3", "minicpm3_tied", "minicpm3_odd",
    "minicpm_fatrelu",
)  # fmt: skip
REFERENCE_ONLY = {"minicpm3_odd"}
"""Golden models that the CUDA executor does not take."""
STORAGE_TOLERANCE = {DType.FLOAT16: 5e-3, DType.BFLOAT16: 4e-2}
"""Norm of the error over the norm of the fp32 logits: weights, KV and activations have 10 and 7 bits of mantissa."""


@cache
def golden(name: str) -> Mapping[str, Any]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


@cache
def model(name: str) -> tuple[ModelConfig, Mapping[str, Any]]:
    config = ModelConfig.from_hf(json.loads(str(golden(name)["config"])))
    return config, random_weights(tensor_specs(config), int(golden(name)["seed"]))


def executor_for(name: str, dtype: DType = DType.FLOAT32, chunk: int = 16, slots: int = 1) -> Executor:
    config, weights = model(name)
    context = int(golden(name)["max_context"]) or None
    return make_executor(config, weights, dtype=dtype, max_context=context, prefill_chunk=chunk, max_sequences=slots)


def relative(actual: Any, expected: Any) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def typical(actual: Any, expected: Any) -> float:
    """Return the median over all positions of the relative error of their logits.

    Where experts have nearly equal scores, rounding to 16 bits may choose another, and the token's logits change.
    """
    return float(np.median(np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)))


def all_tokens(data: Mapping[str, Any]) -> tuple[int, ...]:
    return (*data["prompt_ids"].tolist(), *data["greedy_ids"].tolist())


def logits_of(executor: Executor, token_ids: tuple[int, ...]) -> Any:
    return np.concatenate(list(executor.prompt_logits(0, token_ids)))
