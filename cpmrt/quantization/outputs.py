"""Makes folders and files of weights, which appear only when they are complete, and copies the files beside weights."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from cpmrt.errors import ConfigError, reason_of
from cpmrt.text.chat_template import ADDITIONAL, additional_templates
from cpmrt.weights.checkpoint import INDEX_NAME
from cpmrt.weights.files import open_file, reading
from cpmrt.weights.gguf.names import has_gguf_suffix

_COMPANIONS = ("*.json", "*.jinja", "*.jinja2", "*.model", "*.txt", "*.py", "LICENSE*")
"""Files that are copied beside the weights: tokenizer, chat template, remote code."""
_NOT_COPIED = ("config.json", INDEX_NAME, "quantize_config.json", "*.index.json")
_PIECE_BYTES = 1 << 20


def check_new(out: Path, kind: str) -> None:
    """Raise ConfigError unless `out` can become a new "folder" or "file" (`kind`).

    `new_folder` and `new_file` check it too; commands call it before their long work.
    """
    if os.path.lexists(out):  # also a link to nothing, which no folder can replace at the end
        raise ConfigError(f"{out} exists already", fix=f"name a new {kind}, or delete it")
    if kind == "folder" and has_gguf_suffix(out.name):
        raise ConfigError(
            f"{out}", expected="the name of a folder", actual="that of a GGUF file",
            fix="cpmrt convert MODEL FILE.gguf makes such a file",
        )  # fmt: skip
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder", fix="make it first")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder to fill, which becomes `out` at the end, or is deleted after an error. Raises ConfigError."""
    with _partial(out, "folder") as partial:
        partial.mkdir()
        partial.chmod(0o755)
        yield partial


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Yield the path of a file to make, which becomes `out` at the end, or is deleted after an error.

    Raises ConfigError.
    """
    with _partial(out, "file") as partial:
        yield partial


@contextmanager
def _partial(out: Path, kind: str) -> Iterator[Path]:
    """Yield a path on the disk of `out`; the file or folder there becomes `out` at the end.

    What has come to `out` meanwhile stays: on a disk with hard links nothing replaces it, elsewhere it is looked for
    once more before a file is renamed.
    """
    check_new(out, kind)
    # Named before it is made: a signal may end the program between the two, and what nobody knows is not deleted.
    folder = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    made = folder / out.name
    try:
        folder.mkdir(0o700)
        yield made
        try:
            os.link(made, out)
        except OSError:  # something is there, or `made` is a folder, or on a disk without hard links
            check_new(out, kind)
            made.rename(out)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {reason_of(error)}",
            fix=f"name a {kind} where you may write, on a disk with enough room",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_companions(source: Path, target: Path) -> None:
    """Copy a checkpoint's files beside weights and configs, such as the tokenizer; of subfolders only chat templates.

    Called before the long work, so that a file that cannot be read ends the command at once. Raises CheckpointError.
    """
    with reading(source):
        paths = sorted(path for path in source.iterdir() if not path.is_dir())
    for path in paths:
        is_wanted = any(fnmatchcase(path.name, pattern) for pattern in _COMPANIONS)
        if is_wanted and not any(fnmatchcase(path.name, pattern) for pattern in _NOT_COPIED):
            copy_file(path, target / path.name)
    for path in additional_templates(source):
        (target / ADDITIONAL).mkdir(exist_ok=True)
        copy_file(path, target / ADDITIONAL / path.name)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file of a model's folder. Raises CheckpointError where it cannot be read or is a link out of the folder.
    """
    with target.open("wb") as file:
        file.writelines(_pieces(source))


def _pieces(path: Path) -> Iterator[bytes]:
    with open_file(path) as file, reading(path):
        while piece := file.read(_PIECE_BYTES):
            yield piece
