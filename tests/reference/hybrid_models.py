"""Tiny models with attention and lightning layers: the golden files of `tests/golden/hybrid` and executors for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reference import golden_models
from reference.tiny_models import make_executor

from cpmrt.config import ModelConfig

HYBRID = ("attention_first", "lightning_first", "all_but_plain")


def golden(name: str) -> Mapping[str, Any]:
    return golden_models.golden(f"hybrid/{name}")


def settings_of(name: str) -> dict[str, Any]:
    """Return the config.json of a golden model."""
    settings: dict[str, Any] = json.loads(str(golden(name)["config"]))
    return settings


def model(name: str) -> tuple[ModelConfig, Mapping[str, Any]]:
    return golden_models.model(f"hybrid/{name}")


def executor_for(name: str, **settings: Any) -> Any:
    config, weights = model(name)
    return make_executor(config, weights, **{"prefill_chunk": 64} | settings)


def tokens(name: str) -> tuple[int, ...]:
    return golden_models.all_tokens(golden(name))
