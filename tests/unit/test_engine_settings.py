"""The settings of an engine: what `LLM` takes by name is what `EngineConfig` holds."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature

from cpmrt import LLM
from cpmrt.config import EngineConfig

OWN_FIELDS = {"draft", "speculation"}
"""What `LLM` makes of its arguments `draft` and `speculate` while it opens a model."""


def test_llm_and_engine_config_have_the_same_settings_with_the_same_defaults() -> None:
    arguments = signature(LLM.__init__).parameters
    held = {field.name: field.default for field in fields(EngineConfig) if field.name not in OWN_FIELDS}
    assert {name: arguments[name].default for name in held} == held
