"""Resolves a model as the user names it to its folder and its config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpmrt.config import ModelConfig, SamplingDefaults, SparseSetting, with_sparse_setting
from cpmrt.errors import CheckpointError, listed, quoted, reason_of
from cpmrt.weights import hub
from cpmrt.weights.gguf.names import is_gguf
from cpmrt.weights.hub import BUNDLED
from cpmrt.weights.model_files import is_there, read_json, read_json_if_there
from cpmrt.weights.overrides import ReadKeys, merged
from cpmrt.weights.repository import Repository, has_weights


@dataclass(frozen=True)
class ModelFolder:
    """A local folder with config.json (and perhaps weights and a tokenizer), and what its config says."""

    path: Path
    raw_config: dict[str, Any]
    config: ModelConfig
    sampling: SamplingDefaults
    """The sampling settings that a request has where it does not name its own."""
    repository: Repository | None = None
    """The hub's repository that the folder is from; None for a local folder."""

    @property
    def is_bundled(self) -> bool:
        return self.path == BUNDLED

    @classmethod
    def open(
        cls,
        model: str | Path | None,
        *,
        revision: str | None = None,
        weights: bool = True,
        hf_overrides: Mapping[str, Any] | None = None,
        sparse: SparseSetting = "auto",
    ) -> ModelFolder:
        """Resolve a folder or hub id (None or "demo": the bundled model) and read its config.

        The weights of a hub's model are fetched after its config has been read, or, with `weights` False, not until
        `fetch_weights`. `hf_overrides` replace keys of config.json, objects key by key, and a warning
        names one that nothing reads; `sparse` is applied after them (`config.sparse`). Raises CheckpointError,
        ConfigError, UnsupportedModelError.
        """
        found = hub.find(model, revision=revision)
        path = found if isinstance(found, Path) else found.fetch_config()
        source = path / "config.json"
        check_kind(path)
        raw_config = with_sparse_setting(merged(read_json(source), hf_overrides), sparse)
        generation_source = path / "generation_config.json"
        generation_config = read_json_if_there(generation_source)
        quantize_config = read_json_if_there(path / "quantize_config.json")
        named = _named(source, hf_overrides, sparse)
        keys = ReadKeys(raw_config)
        config = ModelConfig.from_hf(keys, generation_config, named, quantize_config)
        sampling = SamplingDefaults.of_model(generation_config, keys, str(generation_source))
        keys.warn_of_unread(hf_overrides)
        folder = cls(path, raw_config, config, sampling, None if isinstance(found, Path) else found)
        if weights:
            folder.fetch_weights()
        return folder

    @property
    def lacks_weights(self) -> bool:
        """Whether weights have to be fetched from the model's hub."""
        return self.repository is not None and not has_weights(self.path)

    def fetch_weights(self) -> None:
        """Fetch the weights of a hub's model that are not here. Raises CheckpointError."""
        if self.repository is not None and self.lacks_weights:
            self.repository.fetch_weights(self.path)


def check_kind(path: Path) -> None:
    """Raise CheckpointError for a folder that cannot be read, is an adapter for a model, or has no config.json."""
    if is_gguf(path):
        return
    try:
        os.listdir(path)
        os.stat(os.path.join(path, "."))
    except PermissionError as error:
        raise CheckpointError(
            f"you have no permission to read the folder {path}", expected=f"one that user {os.geteuid()} may read",
            actual=f"one of user {path.stat().st_uid}", fix=f"let its owner run: chmod -R a+rX {path}",
        ) from error  # fmt: skip
    except OSError as error:
        raise CheckpointError(f"the folder {path} cannot be read: {reason_of(error)}") from error
    if is_there(path / "adapter_config.json") and not is_there(path / "config.json"):
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        raise CheckpointError(
            f"{path} holds a LoRA adapter (adapter_config.json)", expected="a whole model with config.json",
            fix=f"merge it into its base model {quoted(base)} with peft: merge_and_unload(), then save_pretrained(), "
            "together with the tokenizer",
        )  # fmt: skip
    if not is_there(path / "config.json"):
        raise CheckpointError(
            f"{path} is not a model: {path}/config.json does not exist", expected="config.json beside the weights",
            actual=listed([quoted(name) for name in sorted(os.listdir(path))]) or "an empty folder",
            fix="name the folder that holds both, a .gguf file or a hub id such as openbmb/MiniCPM4-0.5B",
        )  # fmt: skip


def _named(source: Path, overrides: Mapping[str, Any] | None, sparse: SparseSetting) -> str:
    """Return the config's name for error messages: its path and the arguments that changed it and may be at fault."""
    changes = ["hf_overrides"] * bool(overrides) + ["sparse"] * (isinstance(sparse, Mapping) and bool(sparse))
    return str(source) + (f" with {' and '.join(changes)}" if changes else "")
