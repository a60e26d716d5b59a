"""Folders and files of weights that appear when they are complete, or not at all, and what is copied beside weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from cpmrt.errors import ConfigError
from cpmrt.weights.checkpoint import INDEX_NAME

_COMPANIONS = ("*.json", "*.jinja", "*.jinja2", "*.model", "*.txt", "*.py", "LICENSE*")
"""Files that are copied beside the weights: tokenizer, chat template, remote code."""
_NOT_COPIED = ("config.json", INDEX_NAME, "quantize_config.json", "*.index.json")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder to fill, which becomes `out` at the end, or is deleted after an error. Raises ConfigError."""
    with _partial(out, "folder") as partial:
        partial.mkdir()
        partial.chmod(0o755)
        yield partial


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Name a file to make, which becomes `out` at the end, or is deleted after an error. Raises ConfigError."""
    with _partial(out, "file") as partial:
        yield partial


@contextmanager
def _partial(out: Path, kind: str) -> Iterator[Path]:
    """Name a path on the disk of `out`; what is there at the end becomes `out`."""
    if out.exists():
        raise ConfigError(f"{out} exists already", fix=f"name a new {kind}, or delete it")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder", fix="make it first")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            yield Path(folder) / out.name
            (Path(folder) / out.name).rename(out)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror}",
            fix=f"name a {kind} where you may write, on a disk with enough room",
        ) from error


def copy_companions(source: Path, target: Path) -> None:
    """Copy what belongs to a checkpoint beside weights and configs; subfolders stay behind."""
    for path in sorted(source.iterdir()):
        is_wanted = any(fnmatchcase(path.name, pattern) for pattern in _COMPANIONS)
        if is_wanted and path.is_file() and not any(fnmatchcase(path.name, pattern) for pattern in _NOT_COPIED):
            shutil.copyfile(path, target / path.name)
