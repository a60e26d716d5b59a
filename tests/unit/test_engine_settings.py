"""The settings of an engine: what `LLM` takes by name is what `EngineConfig` holds, and sizes of memory."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature

import pytest

from cpmrt import LLM
from cpmrt.config import EngineConfig
from cpmrt.config.engine import parse_bytes

OWN_FIELDS = {"draft", "speculation"}
"""What `LLM` makes of its arguments `draft` and `speculate` while it opens a model."""


def test_llm_and_engine_config_have_the_same_settings_with_the_same_defaults() -> None:
    arguments = signature(LLM.__init__).parameters
    held = {field.name: field.default for field in fields(EngineConfig) if field.name not in OWN_FIELDS}
    assert {name: arguments[name].default for name in held} == held


@pytest.mark.parametrize(("text", "size"), [
    ("8GiB", 8 * 2**30), ("8 GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5MB", 1_500_000), ("3KB", 3000),
    ("3KiB", 3072), ("2k", 2048), ("5m", 5 * 2**20), ("1G", 2**30), ("7 B", 7), (123, 123),
])  # fmt: skip
def test_units_with_an_i_and_single_letters_are_binary(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size
