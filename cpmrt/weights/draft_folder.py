"""Resolves a draft as the user names it to its folder, its method and its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpmrt import env
from cpmrt.config import EngineConfig, SpeculationConfig
from cpmrt.config.speculate_argument import LOOKUP, read_speculation
from cpmrt.errors import CheckpointError, quoted
from cpmrt.weights import hub
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.model_files import read_json, read_json_if_there
from cpmrt.weights.model_folder import ModelFolder

# The configs of drafts are imported where there is a draft: every start uses this module to ask whether there is one.
if TYPE_CHECKING:
    from cpmrt.config.draft import DraftConfig, Shapes


def with_speculation(
    settings: EngineConfig,
    folder: ModelFolder,
    draft: str | Path | None = None,
    speculate: str | Mapping[str, Any] = "auto",
) -> EngineConfig:
    """Return `settings` with the draft that the arguments `draft` and `speculate` of `LLM` ask for.

    `folder` is that of the model to draft for. Raises ConfigError, and CheckpointError if the draft is not there.
    """
    name = None if draft is None else _name_of(draft)
    has_weights = settings.load_format != "dummy"

    def method(inner: str | None) -> str:
        if inner is None:
            return method_of(str(name), folder.path, weights=has_weights)
        return method_of(inner, resolve(str(name), folder.path, weights=has_weights), weights=has_weights)

    wish = read_speculation(name, speculate, method)
    needs_files = wish is not None and wish.method != LOOKUP
    return replace(settings, draft=name if needs_files else None, speculation=wish)


def _name_of(draft: str | Path) -> str:
    """Return the name of a draft: that of a Path in words that mean no repository."""
    name = str(draft)
    return f"./{name}" if isinstance(draft, Path) and "/" in name and not hub.looks_like_path(name) else name


@dataclass(frozen=True)
class DraftFolder:
    """A local folder with a draft's config.json, and its settings next to a target. It needs no tokenizer."""

    path: Path
    config: DraftConfig

    @classmethod
    def open(cls, draft: str, target: ModelFolder, wish: SpeculationConfig, *, weights: bool = True) -> DraftFolder:
        """Resolve the draft (`resolve`), read its config and compare it with the target's.

        With `weights` False the weights will be random, so config.json alone counts. Raises CheckpointError,
        ConfigError, UnsupportedModelError.
        """
        from cpmrt.config.draft import DraftConfig
        from cpmrt.config.dspark import read_dspark
        from cpmrt.config.eagle import read_eagle

        path = resolve(draft, target.path, weights=weights)
        source = str(path / "config.json")
        if wish.method == "model":
            decoder = ModelFolder.open(path).config
            return cls(path, DraftConfig.of_model(decoder, target.config, wish, source))
        shapes = _shapes(path) if weights else None
        quantize_config = read_json_if_there(path / "quantize_config.json")
        raw = read_json(path / "config.json")
        read = read_dspark if wish.method == "dspark" else read_eagle
        return cls(path, read(raw, shapes, target.config, wish, source, quantize_config))


def resolve(draft: str, target: Path, *, weights: bool = True) -> Path:
    """Return the folder of a draft, named by its path, by a subfolder of the target's folder, or by a hub id.

    Raises CheckpointError.
    """
    within = target / draft
    if not os.path.exists(env.expanded(draft)):
        if draft and os.path.isdir(within):  # not Path's, which raises for a name that is too long
            return within
        if hub.looks_like_path(draft) or ("/" not in draft and ":" not in draft):
            raise CheckpointError(
                f"draft {quoted(draft)}",
                expected="an existing folder or a hub id" + _inner_drafts(target),
                fix=f"name one of these, or {LOOKUP}, which needs no model",
            )
    return hub.resolve(draft, weights=weights)


def _inner_drafts(target: Path) -> str:
    names = sorted(path.parent.name for path in target.glob("*/config.json"))
    return f", or {' | '.join(names)} of the model's own" if names else ""


def method_of(draft: str, target: Path, *, weights: bool = True) -> str:
    """Return the method that a draft was made for: eagle2 | eagle3 | dspark | model. Raises CheckpointError.

    The draft's tensors tell; without them (`weights` False) its config.json does, by its keys and its architecture.
    """
    from cpmrt.config.draft import detect_method

    path = resolve(draft, target, weights=weights)
    if weights:
        return detect_method(_shapes(path))
    raw = read_json(path / "config.json")
    name = str(raw.get("architectures")).lower()
    if "markov_rank" in raw:
        return "dspark"
    if "draft_vocab_size" in raw or "eagle3" in name:
        return "eagle3"
    return "eagle2" if "eagle" in name else "model"


def _shapes(path: Path) -> Shapes:
    with Checkpoint.open(path) as checkpoint:
        return {name: entry.shape for name, entry in checkpoint.entries.items()}
