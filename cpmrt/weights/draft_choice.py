"""From the arguments `draft` and `speculate` to settings of the engine; the draft's own files tell its method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpmrt.config import EngineConfig
from cpmrt.config.speculate_argument import LOOKUP, read_speculation
from cpmrt.weights.draft_folder import method_of
from cpmrt.weights.model_folder import ModelFolder


def with_speculation(
    settings: EngineConfig,
    folder: ModelFolder,
    draft: str | Path | None = None,
    speculate: str | Mapping[str, Any] = "auto",
    simulate_accept: float | None = None,
) -> EngineConfig:
    """The settings with what `LLM` is told about drafting for the model in `folder`.

    Raises ConfigError, and CheckpointError if the draft is not there.
    """
    name = None if draft is None else str(draft)
    has_weights = settings.load_format != "dummy"
    wish = read_speculation(name, speculate, lambda: method_of(str(name), folder.path, weights=has_weights))
    needs_files = wish is not None and wish.method != LOOKUP
    return replace(settings, draft=name if needs_files else None, speculation=wish, simulate_accept=simulate_accept)
