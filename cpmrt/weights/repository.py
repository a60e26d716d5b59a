"""A model's repository on a hub: config and tokenizer are fetched first, the weights only when they are asked for."""

from __future__ import annotations

import errno
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Protocol

from cpmrt.byte_sizes import format_bytes
from cpmrt.errors import CheckpointError, listed, quoted, reason_of
from cpmrt.weights.checkpoint import INDEX_NAME, read_index, select_files
from cpmrt.weights.gguf.choice import gguf_labels, select_gguf
from cpmrt.weights.gguf.names import is_gguf

CONFIG_FILES = (
    *("config.json", "generation_config.json", "quantize_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.jinja2", "chat_template.json", "special_tokens_map.json"),
    "additional_chat_templates/*.jinja",
    *("added_tokens.json", "freq_*.pt", "freq_*.json", INDEX_NAME),
)
"""Patterns of the files that are fetched before the weights. The index says which files hold the weights."""
SUBFOLDERS = "freq_*/*"
"""Pattern of files that are never fetched, though `CONFIG_FILES` match them: a hub's `*` matches slashes too."""
NOTHING = "no file has this name"
"""A pattern that matches no file, for a fetch that only asks where the folder is."""
DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""The operating system's errors for a file that cannot be written, or not completely."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedRepository:
    """One repository in a hub's cache, complete or not; `modified` is in seconds since 1970."""

    name: str
    path: Path
    folders: tuple[Path, ...]
    """A folder for each revision."""
    num_bytes: int
    modified: float


class Hub(Protocol):
    """A place that models are fetched from. Every method raises CheckpointError, in words for users."""

    prefix: str
    """The prefix of names that mean this hub."""
    cache_variable: str
    """The environment variable that moves the cache."""

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Fetch the files of a repository that match a pattern, in their newest version, and return their folder.

        Where the hub cannot be reached, or must not be (offline mode), the folder has what is in the cache.
        """
        ...

    def sizes(self, name: str, revision: str | None, folder: Path) -> Mapping[str, int]:
        """Return the size in bytes of every file of the revision for which `fetch` returned `folder`."""
        ...

    def download(self, name: str, revision: str | None, folder: Path, files: Sequence[str]) -> None:
        """Fetch files into the folder that `fetch` returned, continuing what an interrupted call left behind."""
        ...

    def cached(self) -> list[CachedRepository]:
        """Return what the cache holds."""
        ...

    def remove(self, repository: CachedRepository) -> None:
        """Remove all revisions of a repository from the cache. Raises OSError."""
        ...


@dataclass(frozen=True)
class Repository:
    """A repository that the user named, such as openbmb/MiniCPM4-0.5B; `revision` is a branch, tag or commit."""

    hub: Hub
    name: str
    revision: str | None = None
    gguf: str | None = None
    """The GGUF file of the repository that is meant, by its name or the end of it (Q4_K_M); None: safetensors."""

    def __str__(self) -> str:
        return f"{self.hub.prefix}{self.name}"

    def fetch_config(self) -> Path:
        """Fetch config and tokenizer and return their folder; of a GGUF model fetch the file and return its path.

        Raises CheckpointError.
        """
        if self.gguf is not None:
            return self._fetch_gguf(self.gguf)
        folder = self.hub.fetch(self.name, self.revision, CONFIG_FILES)
        if not (folder / "config.json").exists() and (labels := self._gguf_labels(folder)):
            raise CheckpointError(
                f"{self} has GGUF files and no config.json", actual=listed(labels),
                fix=f"say which: {self}:{labels[0]}",
            )  # fmt: skip
        return folder

    def _fetch_gguf(self, wish: str) -> Path:
        """Fetch a GGUF file with all its parts and return the path of the first. Raises CheckpointError."""
        folder = self.hub.fetch(self.name, self.revision, (NOTHING,))
        try:
            sizes = self.hub.sizes(self.name, self.revision, folder)
        except CheckpointError:
            with suppress(CheckpointError):  # without the hub, a file in the cache will do
                return folder / select_gguf([path.name for path in folder.glob("*")], wish, str(self))[0]
            raise
        wanted = select_gguf(list(sizes), wish, str(self))
        missing = {name: sizes[name] for name in wanted if not _has_size(folder / name, sizes[name])}
        if missing:
            self._check_room(folder, missing)
            self.hub.download(self.name, self.revision, folder, list(missing))
        return folder / wanted[0]

    def _gguf_labels(self, folder: Path) -> list[str]:
        """Return the names by which its GGUF files can be asked for (Q4_K_M); none if the hub cannot be reached."""
        try:
            return gguf_labels(list(self.hub.sizes(self.name, self.revision, folder)))
        except CheckpointError:
            return []

    def fetch_weights(self, folder: Path) -> None:
        """Fetch the files of weights that `folder` (of `fetch_config`) lacks or has in another size (GGUF: none).

        The download is logged, with its size, and refused if the disk has no room for it. If the hub cannot be
        asked, the weights in the folder are taken as they are, if all are there. Raises CheckpointError.
        """
        if self.gguf is not None:
            return
        try:
            sizes = self.hub.sizes(self.name, self.revision, folder)
        except CheckpointError:
            if has_weights(folder):
                return
            raise
        names = [name for name in sizes if "/" not in name]
        index = folder / INDEX_NAME
        wanted = select_files(names, read_index(index) if index.exists() else None, str(self))
        absent = [name for name in wanted if name not in sizes]
        if absent:
            raise CheckpointError(
                f"{self}: {INDEX_NAME} names files that the repository lacks", actual=listed(absent),
                fix="the upload is incomplete: try later, or another revision",
            )  # fmt: skip
        missing = {name: sizes[name] for name in wanted if not _has_size(folder / name, sizes[name])}
        if not missing:
            return
        self._check_room(folder, missing)
        self.hub.download(self.name, self.revision, folder, list(missing))
        if not has_weights(folder):
            raise CheckpointError(
                f"{self}: the download ended without all weights in {folder}", fix="try again: it goes on from there"
            )

    def _check_room(self, folder: Path, missing: Mapping[str, int]) -> None:
        """Log what will be downloaded. Raises CheckpointError if the disk has no room for it."""
        total, here = sum(missing.values()), _partial_bytes(folder)
        cache = folder.parent.parent
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(existing).free
        some = f", of which {format_bytes(here)} are here" if here else ""
        files = f"{len(missing)} file{'s' if len(missing) != 1 else ''}"
        _LOG.info("%s: downloading %s of weights, %s%s, to %s", self, files, format_bytes(total), some, cache)
        if total - here > free:
            raise CheckpointError(
                f"{self}: the disk of {cache} has no room for the weights",
                expected=f"{format_bytes(total - here)} free", actual=format_bytes(free),
                fix=f"make room (`cpmrt list` shows the cache), or set {self.hub.cache_variable} to a folder elsewhere",
            )  # fmt: skip


def has_weights(folder: Path) -> bool:
    """Tell whether a folder has all its weights: every file that its index names or, without one, any .safetensors.

    A GGUF file has them.
    """
    if is_gguf(folder):
        return True
    index = folder / INDEX_NAME
    if index.exists():
        return all((folder / name).exists() for name in read_index(index).values())
    return any(folder.glob("*.safetensors"))


def shows_bars() -> bool:
    """Tell whether a download may draw progress bars: on a terminal, unless warnings are silenced (--quiet)."""
    return sys.stderr.isatty() and _LOG.isEnabledFor(logging.WARNING)


def literal(names: Sequence[str]) -> list[str]:
    """Return patterns that match exactly these names."""
    return [escape(name) for name in names]


def disk_full(repository: str, error: OSError, variable: str) -> CheckpointError:
    """Return the error for a download that could not be written to the cache."""
    return CheckpointError(
        f"{repository} could not be written to the cache: {reason_of(error)}",
        actual=quoted(error.filename) if error.filename else None,
        fix=f"make room (`cpmrt list` shows the cache) or set {variable} to another folder, then try again",
    )


def _has_size(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def _partial_bytes(folder: Path) -> int:
    """Return the bytes that interrupted downloads of a repository left."""
    return sum(file.stat().st_size for file in folder.parent.parent.rglob("*.incomplete") if file.is_file())
