"""Describes a model from its files, for commands that load no weights: config, how weights will be held, draft."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack

from cpmrt.bench.shapes import shape_folder
from cpmrt.cli import arguments as options
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.opening import Blueprint, Target, described
from cpmrt.weights.model_folder import ModelFolder


def add_description_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that change a model, besides its own files and the engine's settings."""
    options.add_options(parser, *options.WEIGHT_BITS, "--hf-overrides", "--sparse")
    options.add_draft_options(parser)


def described_model(
    args: argparse.Namespace,
    settings: EngineConfig,
    target: Callable[[ModelConfig], Target],
    *,
    model: str | None,
    shape: str | None,
) -> tuple[str, Blueprint]:
    """Return the name and the blueprint of `model` (None: the bundled one) or of the well-known `shape`.

    The options change it. No weights are fetched from the hub; those that are there already say which layers are
    quantised or ternary.
    Raises CheckpointError, ConfigError, UnsupportedModelError, UsageError.
    """
    changes, overrides = options.draft_changes(args), options.overrides_with_weight_bits(args)
    with ExitStack() as stack:
        source = stack.enter_context(shape_folder(shape, changes)) if shape else model
        folder = ModelFolder.open(
            source, revision=args.revision, weights=False, hf_overrides=overrides, sparse=args.sparse
        )  # fmt: skip
        blueprint = described(
            folder, settings, target(folder.config), **options.draft_arguments(args),
            reads_weights=args.weight_bits is None and args.block_type is None,
        )  # fmt: skip
        return shape or str(folder.path), blueprint
