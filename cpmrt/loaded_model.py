"""A model that is ready to run: its folder, tokenizer and chat template, and the executor that holds its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpmrt.config import EngineConfig, SparseSetting
from cpmrt.errors import ConfigError, quoted
from cpmrt.executor import Executor
from cpmrt.executor_choice import on_executor
from cpmrt.memory.plan import MemoryPlan
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.weights.draft_folder import with_speculation
from cpmrt.weights.model_folder import ModelFolder


@dataclass(frozen=True)
class LoadedModel:
    """The parts of a model that `LLM` runs. `settings` are those that were asked for, with those of the draft added."""

    folder: ModelFolder
    settings: EngineConfig
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    executor: Executor
    plan: MemoryPlan


def load_model(
    model: str | Path | None,
    settings: EngineConfig,
    *,
    revision: str | None,
    hf_overrides: Mapping[str, Any] | None,
    sparse: SparseSetting,
    draft: str | Path | None,
    speculate: str | Mapping[str, Any],
) -> LoadedModel:
    """Load a model and its draft; arguments as `LLM` takes them.

    Raises CheckpointError, ConfigError, UnsupportedModelError, MemoryPlanError or NoDeviceError.
    """
    _check_sources(model=model, draft=draft)
    is_dummy = settings.load_format == "dummy"
    folder = ModelFolder.open(model, revision=revision, weights=False, hf_overrides=hf_overrides, sparse=sparse)
    # Random weights need no tokenizer; a real checkpoint has one.
    open_tokenizer = Tokenizer.open_if_there if is_dummy else Tokenizer.open
    tokenizer = open_tokenizer(folder.path, vocab_size=folder.config.vocab_size)
    if folder.lacks_weights and not is_dummy:
        on_executor(folder, settings, lambda assembly: assembly.fetch_weights(folder, settings))
    settings = with_speculation(settings, folder, draft, speculate)
    template = ChatTemplate.open(folder.path)
    executor, plan = on_executor(folder, settings, lambda assembly: assembly.open_executor(folder, settings))
    return LoadedModel(folder, settings, tokenizer, template, executor, plan)


def _check_sources(**sources: object) -> None:
    for name, value in sources.items():
        if value is not None and not isinstance(value, (str, Path)):
            raise ConfigError(name, expected="a folder or a hub id", actual=quoted(value))
