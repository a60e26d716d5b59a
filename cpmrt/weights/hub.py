"""Finds a model's files: in a local folder, or in a repository of a hub, from which they are fetched to its cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cpmrt import env
from cpmrt.errors import CheckpointError, ConfigError, quoted
from cpmrt.weights.gguf.names import has_gguf_suffix
from cpmrt.weights.hugging_face import HuggingFace
from cpmrt.weights.modelscope import ModelScope
from cpmrt.weights.repository import Hub, Repository, has_weights

BUNDLED = Path(__file__).parent.parent / "assets" / "demo"
"""The model that comes with cpmrt."""
HUBS: tuple[Hub, ...] = (ModelScope(), HuggingFace())
"""The hubs. The one without a prefix is last: every name begins with its empty prefix."""
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"{_NAME}/{_NAME}")


def find(model: str | Path | None, *, revision: str | None = None) -> Path | Repository:
    """Return the local folder or GGUF file that `model` names, or the hub's repository: "org/name" of Hugging Face or
    "modelscope:org/name", either with the name of a GGUF file behind it (`repository`).

    None is the bundled model, and so is "demo" unless there is a folder of that name. A local name never touches the
    network, and a `Path` is always local. `revision` is a branch, tag or commit of a repository. Raises
    CheckpointError; ConfigError for a folder with a revision.
    """
    if model is None or (model == BUNDLED.name and not os.path.isdir(model)):
        if revision is not None:
            raise ConfigError(f"the bundled model has no revision {quoted(revision)}", fix="name a model")
        return BUNDLED
    path = env.expanded(model)
    if os.path.isdir(path):
        if revision is not None:
            raise ConfigError(f"{path} is a local folder, which has no revision", fix="leave revision out")
        return Path(path)
    if has_gguf_suffix(path) and os.path.isfile(path):
        if revision is not None:
            raise ConfigError(f"{path} is a local file, which has no revision", fix="leave revision out")
        return Path(path)
    if isinstance(model, Path) or looks_like_path(model):
        found = "a file" if os.path.isfile(path) else "nothing there"
        raise CheckpointError(
            f"model {quoted(str(model))}",
            expected="a folder or a .gguf file",
            actual=found,
            fix="name the folder that holds config.json and the weights",
        )
    return repository(model, revision)


def repository(name: str, revision: str | None = None) -> Repository:
    """Return the hub's repository that `name` stands for; local folders do not count. Raises CheckpointError.

    Behind a colon `name` may have that of a GGUF file in the repository, or its end: "org/name-GGUF:Q4_K_M".
    """
    hub = next(hub for hub in HUBS if name.startswith(hub.prefix))
    inner, _, gguf = name.removeprefix(hub.prefix).partition(":")
    if not _REPOSITORY.fullmatch(inner) or "--" in inner or ".." in inner or inner.endswith(".git"):
        raise CheckpointError(
            f"model {quoted(name)}",
            expected="an existing folder or a hub id such as openbmb/MiniCPM4-0.5B or modelscope:OpenBMB/MiniCPM4-0.5B",
        )
    return Repository(hub, inner, revision, gguf or None)


def looks_like_path(model: str) -> bool:
    """Return whether a name that is not a folder can only be meant as a path, not as a repository."""
    is_file_name = has_gguf_suffix(model) and "/" not in model
    return is_file_name or model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or os.path.isfile(model)


def resolve(model: str | Path | None, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return the folder with the files of `model` (as `find` takes it), fetched if they are not here.

    With `weights` False only config and tokenizer are fetched. Raises CheckpointError, ConfigError.
    """
    found = find(model, revision=revision)
    if isinstance(found, Path):
        return found
    folder = found.fetch_config()
    if weights and not has_weights(folder):
        found.fetch_weights(folder)
    return folder
