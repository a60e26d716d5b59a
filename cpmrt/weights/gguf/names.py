"""Recognises GGUF files by their names. It reads none, so that models of other files start without what does."""

from __future__ import annotations

import re
from pathlib import Path

GGUF_SUFFIX = ".gguf"
_SPLIT_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.DOTALL | re.IGNORECASE)


def has_gguf_suffix(name: str) -> bool:
    """Whether a file's name is that of a GGUF file; capitals do not matter."""
    return name.lower().endswith(GGUF_SUFFIX)


def without_gguf_suffix(name: str) -> str:
    """Return a file's name without the suffix of GGUF files, if it has that."""
    return name[: -len(GGUF_SUFFIX)] if has_gguf_suffix(name) else name


def is_gguf(path: Path) -> bool:
    """Tell whether a path is that of a file whose name ends in .gguf."""
    return has_gguf_suffix(path.name) and path.is_file()


def split_paths(path: Path) -> list[Path]:
    """Return all files of the model that `path` is a part of, in order; only `path` if its name is not that of a part.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    stem, _, count, suffix = match.groups()
    return [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in range(1, int(count) + 1)]
