"""Tiny models with attention and lightning layers: the golden files of `tests/golden/hybrid` and executors for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from reference.tiny_models import GOLDEN, make_executor, random_weights

from cpmrt.config import ModelConfig
from cpmrt.models.decoder import tensor_specs

HYBRID = ("attention_first", "lightning_first", "all_but_plain")


@cache
def golden(name: str) -> Mapping[str, Any]:
    with np.load(GOLDEN / "hybrid" / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def settings_of(name: str) -> dict[str, Any]:
    """The config.json of a golden model."""
    settings: dict[str, Any] = json.loads(str(golden(name)["config"]))
    return settings


@cache
def model(name: str) -> tuple[ModelConfig, Mapping[str, Any]]:
    config = ModelConfig.from_hf(settings_of(name))
    return config, random_weights(tensor_specs(config), int(golden(name)["seed"]))


def executor_for(name: str, **settings: Any) -> Any:
    config, weights = model(name)
    return make_executor(config, weights, **{"prefill_chunk": 64} | settings)


def tokens(name: str) -> tuple[int, ...]:
    return (*golden(name)["prompt_ids"].tolist(), *golden(name)["greedy_ids"].tolist())
