"""Finds a model's files: in a local folder, or in a Hugging Face hub repository, which is fetched to the cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cpmrt.errors import CheckpointError, ConfigError, quoted

_CONFIG_FILES = (
    *("config.json", "generation_config.json", "quantize_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.jinja2", "chat_template.json", "special_tokens_map.json"),
    *("added_tokens.json", "freq_*.pt", "freq_*.json"),
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_SUBFOLDERS = "*/*"
"""Never fetched: they hold other formats of the same weights (`*` of a hub pattern matches slashes too)."""
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"{_NAME}/{_NAME}")


def resolve(model: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return the folder with the files of `model`: itself if it is one, else fetched as the hub id "org/name".

    A local folder never touches the network, and a `Path` is always local. `revision` is a branch, tag or
    commit of a hub repository; `weights=False` fetches configs and tokenizer only. Cache, token and offline
    mode (`HF_HUB_OFFLINE=1`) are huggingface_hub's. Raises CheckpointError; ConfigError for a folder with a
    revision.
    """
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        if revision is not None:
            raise ConfigError(f"{path} is a local folder, which has no revision", fix="leave revision out")
        return Path(path)
    if isinstance(model, Path) or _looks_like_path(model):
        found = "a file" if os.path.isfile(path) else "nothing there"
        raise CheckpointError(
            f"model {quoted(str(model))}",
            expected="a folder",
            actual=found,
            fix="name the folder that holds config.json and the weights",
        )
    if not _REPOSITORY.fullmatch(model) or "--" in model or ".." in model or model.endswith(".git"):
        raise CheckpointError(
            f"model {quoted(model)}", expected="an existing folder or a hub id such as openbmb/MiniCPM4-0.5B"
        )
    return _fetch(model, revision, weights)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or os.path.isfile(model)


def _fetch(repository: str, revision: str | None, weights: bool) -> Path:
    # Imported here: it costs a third of a second, which a local model need not pay.
    from huggingface_hub import snapshot_download

    patterns = [*_CONFIG_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=[_SUBFOLDERS])
        )
    except Exception as error:  # transport errors are classes of whichever HTTP client the library uses
        raise _explain(repository, revision, error) from error
    if weights and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{repository} has no *.safetensors weights, and other formats (.bin, .gguf) are not read",
            fix="choose a repository with safetensors, or load and save it once with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
            "; if it has them and you are offline, connect once to complete the cached copy",
        )
    return folder


def _explain(repository: str, revision: str | None, error: Exception) -> CheckpointError:
    """Put what the hub library raised into one line; the most special class comes first."""
    from huggingface_hub import errors

    label = f"{repository} at revision {quoted(revision)}" if revision is not None else repository
    if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        error = error.__cause__
    for kind, what, fix in (
        (errors.GatedRepoError, f"{repository} is gated",
         f"accept its terms at https://huggingface.co/{repository} and set HF_TOKEN to your token"),
        (errors.RepositoryNotFoundError,
         f"{repository} is neither a local folder nor a repository of the hub that you may see",
         "check the name; a private repository needs HF_TOKEN"),
        (errors.RevisionNotFoundError, f"{repository} has no revision {quoted(revision)}",
         "name a branch, tag or commit of it"),
        (errors.OfflineModeIsEnabled, f"{label} is not in the local cache, or not all of it, and offline mode is on",
         "unset HF_HUB_OFFLINE to download it, or name a local folder"),
    ):  # fmt: skip
        if isinstance(error, kind):
            return CheckpointError(what, fix=fix)
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__ or error
        return CheckpointError(
            f"{label} is not in the local cache, and the hub cannot be reached",
            actual=quoted(f"{type(cause).__name__}: {cause}"),
            fix="check the network connection, or name a local folder",
        )
    return CheckpointError(
        f"{label} could not be downloaded",
        actual=f"{type(error).__name__}: {error}",
        fix="check network, disk space and access, then try again",
    )
