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
from cpmrt.weights.gguf.folder import is_gguf

CONFIG_FILES = (
    *("config.json", "generation_config.json", "quantize_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.jinja2", "chat_template.json", "special_tokens_map.json"),
    "additional_chat_templates/*.jinja",
    *("added_tokens.json", "freq_*.pt", "freq_*.json", INDEX_NAME),
)
"""Patterns of what is fetched first. The index says which files the weights are in."""
SUBFOLDERS = "freq_*/*"
"""Never fetched, though the patterns of `CONFIG_FILES` match them: `*` of a hub's pattern matches slashes too."""
NOTHING = "no file has this name"
"""A pattern that fetches no file: the folder is only looked for."""
DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""What the operating system says where a file cannot be written, or not all of it."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedRepository:
    """What a hub's cache holds of one repository; `modified` is in seconds since 1970."""

    name: str
    path: Path
    folders: tuple[Path, ...]
    """A folder for each revision."""
    num_bytes: int
    modified: float


class Hub(Protocol):
    """A place that models are fetched from. Every method raises CheckpointError, in words for users."""

    prefix: str
    """What a name begins with to mean this hub."""
    cache_variable: str
    """The environment variable that moves the cache."""

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Return the folder with those files of a repository that fit a pattern, as newly fetched as can be.

        A hub that cannot be reached, or must not be (offline mode), leaves what the cache has.
        """
        ...

    def sizes(self, name: str, revision: str | None, folder: Path) -> Mapping[str, int]:
        """Return all files of the revision that `fetch` made `folder` of, with their sizes in bytes."""
        ...

    def download(self, name: str, revision: str | None, folder: Path, files: Sequence[str]) -> None:
        """Fetch files into the folder that `fetch` returned; what an interrupted call left behind is used."""
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
    """A GGUF file of it by name, or by the end of its name: Q4_K_M."""

    def __str__(self) -> str:
        return f"{self.hub.prefix}{self.name}"

    def fetch_config(self) -> Path:
        """Return the folder of the repository with config and tokenizer fetched; of a GGUF model the whole file.

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
            with suppress(CheckpointError):  # without the hub what the cache has will do
                return folder / select_gguf([path.name for path in folder.glob("*")], wish, str(self))[0]
            raise
        wanted = select_gguf(list(sizes), wish, str(self))
        missing = {name: sizes[name] for name in wanted if not _has_size(folder / name, sizes[name])}
        if missing:
            self._check_room(folder, missing)
            self.hub.download(self.name, self.revision, folder, list(missing))
        return folder / wanted[0]

    def _gguf_labels(self, folder: Path) -> list[str]:
        """Return what the GGUF files of the repository can be asked for by, none where the hub cannot be reached."""
        try:
            return gguf_labels(list(self.hub.sizes(self.name, self.revision, folder)))
        except CheckpointError:
            return []

    def fetch_weights(self, folder: Path) -> None:
        """Fetch those files of weights that `folder`, from `fetch_config`, lacks or has of another size (GGUF: none).

        What will be downloaded is logged, with its size, and refused if the disk has no room for it. Where the hub
        cannot be asked, weights that are here do. Raises CheckpointError.
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
    """Tell whether a folder has all its files of weights: those that an index names, else any. A GGUF file has them."""
    if is_gguf(folder):
        return True
    index = folder / INDEX_NAME
    if index.exists():
        return all((folder / name).exists() for name in read_index(index).values())
    return any(folder.glob("*.safetensors"))


def shows_bars() -> bool:
    """Tell whether a download may draw its progress: on a terminal where not even warnings are hushed (--quiet)."""
    return sys.stderr.isatty() and _LOG.isEnabledFor(logging.WARNING)


def literal(names: Sequence[str]) -> list[str]:
    """Return patterns that match exactly these names."""
    return [escape(name) for name in names]


def disk_full(repository: str, error: OSError, variable: str) -> CheckpointError:
    """Return the error for a download that the disk did not take."""
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
