"""Opens files and parses JSON that may be missing, cut, hostile or something else entirely."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import BinaryIO

from cpmrt.errors import CheckpointError, quoted

MAX_JSON_BYTES = 10_000_000
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the small text begins that git leaves in place of a large file."""


def lfs_pointer(path: Path | str) -> CheckpointError:
    """Return the error for a file of which only the Git LFS pointer is here."""
    return CheckpointError(
        f"{path} is a Git LFS pointer", expected="the file that it stands for",
        fix="in the cloned folder: git lfs install && git lfs pull; or let cpmrt pull ORG/NAME download the model",
    )  # fmt: skip


def open_file(path: Path) -> BinaryIO:
    """Open a regular file (or a link to one) for reading. Raises CheckpointError.

    Anything else is refused before it is opened: a FIFO would block, a device never ends.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        return path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def parse_object(raw: bytes, source: str, *, unique_keys: bool = False) -> dict[str, object]:
    """Parse a JSON object from UTF-8 bytes; `source` names it in errors.

    `unique_keys` refuses an object, at any depth, that has a key twice (JSON leaves open which one counts).
    Raises CheckpointError.
    """

    if raw.startswith(LFS_POINTER):
        raise lfs_pointer(source)

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise CheckpointError(f"{source} has the key {quoted(key)} twice")
        return dict(pairs)

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique if unique_keys else None)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source} is not UTF-8: byte {error.start} cannot be decoded") from error
    except RecursionError as error:
        raise CheckpointError(f"{source} is nested too deeply to be JSON of a model") from error
    except ValueError as error:
        raise CheckpointError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(source, expected="a JSON object", actual=quoted(value))
    return value


def read_json(path: Path, *, unique_keys: bool = False) -> dict[str, object]:
    """Read the object in a JSON file such as config.json or tokenizer_config.json.

    NaN and Infinity are accepted, as Python's own writer makes them; `unique_keys` as in `parse_object`.
    Raises CheckpointError if the file is missing, over 10 MB, not UTF-8, not JSON or not an object.
    """
    with open_file(path) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} is too large for a JSON file of a model", expected=f"at most {MAX_JSON_BYTES} bytes"
        )
    return parse_object(raw, str(path), unique_keys=unique_keys)
