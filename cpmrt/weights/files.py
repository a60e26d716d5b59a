"""Opens files and parses JSON that may be missing, cut, hostile or something else entirely."""

from __future__ import annotations

import json
import os
import stat
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cpmrt.errors import CheckpointError, quoted, reason_of

MAX_JSON_BYTES = 10_000_000
DOWNLOAD_AGAIN = "the file may be cut or damaged: download it again"
_MEND = "mend the file, or download it again"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of the small text that git leaves in place of a large file."""


def lfs_pointer(path: Path | str) -> CheckpointError:
    """Return the error for a file that is only a Git LFS pointer."""
    return CheckpointError(
        f"{path} is a Git LFS pointer", expected="the file that it stands for",
        fix="in the cloned folder: git lfs install && git lfs pull; or let cpmrt pull ORG/NAME download the model",
    )  # fmt: skip


def is_there(path: Path) -> bool:
    """Whether a folder has an entry of that name; a link that leads nowhere counts as one.

    Only an absent file counts as absent: whatever else keeps it from being found raises CheckpointError.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error
    return True


def open_file(path: Path, *, anywhere: bool = False) -> BinaryIO:
    """Open a regular file for reading. Raises CheckpointError.

    A link must lead to a file in the same folder or to a blob of the hub's cache, because a folder that somebody else
    made could otherwise expose any file of this machine. With `anywhere` it may lead to any file. Anything but a
    regular file is refused before it is opened: a FIFO would block, a device never ends.
    """
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
        if path.is_symlink() and not anywhere:
            _check_link(path)
        if not is_regular:
            raise CheckpointError(f"{path} is not a regular file")
        return path.open("rb")
    except FileNotFoundError as error:
        what = f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "does not exist"
        raise CheckpointError(f"{path} {what}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, such as that of a failing disk, into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return all bytes of a file. Raises CheckpointError if it cannot be opened or read, or has more than `max_bytes`.
    """
    with open_file(path) as file, reading(path):
        return bounded(file.read(max_bytes + 1), path, max_bytes)


def bounded(raw: bytes, path: Path, max_bytes: int) -> bytes:
    """Return the contents `raw` of a file. Raises CheckpointError if they are more than `max_bytes`."""
    if len(raw) > max_bytes:
        raise CheckpointError(f"{path} is too large", expected=f"at most {max_bytes} bytes")
    return raw


def _check_link(path: Path) -> None:
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    if not any(target.is_relative_to(root) for root in (folder, *_blobs(folder))):
        raise CheckpointError(
            f"{path} is a link that leads out of its folder", expected="a file, or a link within the folder",
            actual=quoted(str(target)), fix="put a copy of the file there if you trust where the folder comes from",
        )  # fmt: skip


def _blobs(folder: Path) -> Iterator[Path]:
    """Yield the folders with the contents of the files in `folder`, where it is in a hub's cache; else nothing.

    It is models--org--name/snapshots/commit there, or a folder below. The contents are in the repository's own folder
    `blobs`, or in that of the whole cache, whose files several repositories share.
    """
    for place in (folder, *folder.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith("models--"):
            yield from (Path(os.path.realpath(folder / "blobs")) for folder in (repository, repository.parent))


def parse_object(raw: bytes, source: str, *, unique_keys: bool = False) -> dict[str, object]:
    """Parse a JSON object from UTF-8 bytes; `source` names it in errors.

    `unique_keys` refuses an object, at any depth, that has a key twice (JSON leaves open which one counts).
    Raises CheckpointError.
    """

    if raw.startswith(LFS_POINTER):
        raise lfs_pointer(source)
    if raw.startswith(BOM_UTF8):
        what = f"{source} is not valid JSON: it begins with a byte order mark"
        raise CheckpointError(what, fix="save it as UTF-8 without one")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise CheckpointError(f"{source} has the key {quoted(key)} twice")
        return dict(pairs)

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique if unique_keys else None)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source} is not UTF-8: byte {error.start} cannot be decoded", fix=_MEND) from error
    except RecursionError as error:
        raise CheckpointError(f"{source} is nested too deeply to be JSON of a model") from error
    except ValueError as error:
        raise CheckpointError(f"{source} is not valid JSON: {error}", fix=_MEND) from error
    if not isinstance(value, dict):
        raise CheckpointError(source, expected="a JSON object", actual=quoted(value))
    return value
