"""A model as its files describe it, for commands that load none: config, weights as they will be held, draft."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from cpmrt.bench.run import shape_folder
from cpmrt.cli.arguments import (
    WEIGHT_BITS,
    add_draft_options,
    add_options,
    draft_arguments,
    draft_changes,
    overrides_with_weight_bits,
)
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.config.speculate_argument import LOOKUP
from cpmrt.models.draft import Draft
from cpmrt.models.draft_weights import open_draft
from cpmrt.models.planning import weight_specs
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.draft_folder import resolve, with_speculation
from cpmrt.weights.model_folder import ModelFolder


@dataclass(frozen=True)
class DescribedModel:
    """A model that is not loaded. `name` is that of the shape or the folder, `specs` are the weights as held."""

    name: str
    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    draft: Draft | None


def add_description_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that change a model, besides its own files and the engine's settings."""
    add_options(parser, *WEIGHT_BITS, "--hf-overrides", "--sparse")
    add_draft_options(parser)


def described_model(
    args: argparse.Namespace, settings: EngineConfig, *, model: str | None, shape: str | None
) -> DescribedModel:
    """Describe `model` (None: the bundled one) or the well-known `shape`, changed as the options say.

    This fetches no weights from the hub; those of a quantised model that are there say which layers are quantised.
    Raises CheckpointError, ConfigError, UnsupportedModelError, UsageError.
    """
    changes, overrides = draft_changes(args), overrides_with_weight_bits(args)
    with ExitStack() as stack:
        source = stack.enter_context(shape_folder(shape, changes)) if shape else model
        folder = ModelFolder.open(
            source, revision=args.revision, weights=False, hf_overrides=overrides, sparse=args.sparse
        )  # fmt: skip
        specs = _specs(folder, settings, from_weights=args.weight_bits is None)
        draft = _draft(folder, settings, specs, **draft_arguments(args))
    return DescribedModel(shape or str(folder.path), folder.config, specs, draft)


def _specs(folder: ModelFolder, settings: EngineConfig, *, from_weights: bool) -> tuple[TensorSpec, ...]:
    """Return the weights as they will be held; a quantised checkpoint that is here tells more than its config.json."""
    if from_weights and folder.config.quantization and any(folder.path.glob("*.safetensors")):
        with Checkpoint.open(folder.path) as checkpoint:
            return weight_specs(folder.config, settings, checkpoint)
    return weight_specs(folder.config, settings)


def _draft(
    folder: ModelFolder, settings: EngineConfig, specs: Sequence[TensorSpec], draft: str | None, speculate: Any
) -> Draft | None:
    """Return the draft of the model: as its tensors say where they are there, else by its config.json."""
    is_model = draft not in (None, LOOKUP) and speculate != "off"
    if is_model and not any(resolve(str(draft), folder.path, weights=False).glob("*.safetensors")):
        settings = replace(settings, load_format="dummy")
    with open_draft(folder, with_speculation(settings, folder, draft, speculate), specs) as (_, found):
        return found
