"""Presents a GGUF file as a Hugging Face folder: config.json and its companions, made from the file's keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.errors import CheckpointError
from cpmrt.weights.gguf.config import config_json, generation_config_json
from cpmrt.weights.gguf.file import GgufModel
from cpmrt.weights.gguf.vocabulary import has_tokenizer, tokenizer_config_json, tokenizer_json


def read_member(path: Path, name: str) -> bytes | None:
    """Return the bytes of the file `name` in the folder that the GGUF file `path` stands for; None if it has no such.

    Raises CheckpointError, ConfigError, UnsupportedModelError.
    """
    make = _members(path).get(name)
    if make is None:
        return None
    # A key may hold an array where a number belongs: the reader of the member refuses it.
    text = json.dumps(make(), ensure_ascii=False, default=np.ndarray.tolist)
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # only a whole tokenizer.json can have it, as an escape sequence
        raise CheckpointError(f"{path / name} is not valid Unicode: half of a surrogate pair") from error


def has_member(path: Path, name: str) -> bool:
    """Tell whether `read_member` has something to return, without making it. Raises as it does."""
    return name in _members(path)


def _members(path: Path) -> Mapping[str, Callable[[], dict[str, Any]]]:
    status = path.stat()
    return _made(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _made(path: Path, size: int, changed: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the function that makes each file of the folder, by name.

    `size` and `changed` (the time of change) are only keys of the cache, so that a file that has changed is read again.
    """
    with GgufModel.open(path) as model:
        metadata, config = model.metadata, config_json(model)
    members: dict[str, Callable[[], dict[str, Any]]] = {"config.json": lambda: config}
    if sampling := generation_config_json(metadata):
        members["generation_config.json"] = lambda: sampling
    if has_tokenizer(metadata):
        members["tokenizer.json"] = lambda: tokenizer_json(metadata, path)
        members["tokenizer_config.json"] = lambda: tokenizer_config_json(metadata, path)
    return members
