"""The ModelScope hub, through its light client `modelscope-hub` (extra `modelscope`).

Cache (MODELSCOPE_CACHE), token (MODELSCOPE_API_TOKEN) and endpoint (MODELSCOPE_ENDPOINT) are that library's.
"""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from cpmrt import env
from cpmrt.errors import CheckpointError, quoted
from cpmrt.installation import check_extra, missing_packages
from cpmrt.weights.repository import DISK_ERRORS, SUBFOLDERS, CachedRepository, disk_full, literal, shows_bars


class ModelScope:
    """The hub at modelscope.cn. A folder of its cache is named for a branch or tag."""

    prefix = "modelscope:"
    cache_variable = "MODELSCOPE_CACHE"

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Return the folder of a revision with the files that match; the cached one offline or without network."""
        return self._fetch(name, revision, patterns, has_bars=False)

    def _fetch(self, name: str, revision: str | None, patterns: Sequence[str], *, has_bars: bool) -> Path:
        api, errors = _client()
        try:
            if env.is_hub_offline():
                return self._cached_folder(name, revision)
            wanted = {"allow_patterns": list(patterns), "ignore_patterns": [SUBFOLDERS]}
            with _bars(has_bars):
                return Path(api.download_repo(name, "model", revision=revision, **wanted))
        except errors.NetworkError as error:
            try:
                return self._cached_folder(name, revision)
            except CheckpointError:
                raise _explain(name, revision, error) from error
        except (errors.HubError, OSError) as error:
            raise _explain(name, revision, error) from error

    def _cached_folder(self, name: str, revision: str | None) -> Path:
        api, errors = _client()
        try:
            return Path(api.download_repo(name, "model", revision=revision, local_files_only=True))
        except errors.CacheError as error:
            raise CheckpointError(
                f"{self.prefix}{name} is not in the local cache, and offline mode is on",
                fix="unset HF_HUB_OFFLINE to download it, or name a local folder",
            ) from error

    def sizes(self, name: str, revision: str | None, folder: Path) -> Mapping[str, int]:
        """Return the sizes of all files, from one request. Raises CheckpointError, also offline."""
        if env.is_hub_offline():
            raise CheckpointError(
                f"{self.prefix}{name} is not in the local cache, or not all of it, and offline mode is on",
                fix="unset HF_HUB_OFFLINE to download it, or name a local folder",
            )
        api, errors = _client()
        try:
            files = api.list_repo_files(name, "model", revision=revision)
        except (errors.HubError, OSError) as error:
            raise _explain(name, revision, error) from error
        return {file.path: file.size for file in files if file.type == "blob"}

    def download(self, name: str, revision: str | None, folder: Path, files: Sequence[str]) -> None:
        """Fetch files; the library compares their SHA-256 and continues those of which a part is here."""
        self._fetch(name, revision, literal(files), has_bars=shows_bars())

    def cached(self) -> list[CachedRepository]:
        """Return the models in the cache; nothing where the client is not installed."""
        if missing_packages("modelscope"):
            return []
        api, _ = _client()
        found = []
        for repository in api.scan_cache().repos:
            path = Path(repository.local_path)
            if str(repository.repo_type) != "model":
                continue
            # The client makes the folder of a name before it asks whether there is such a model.
            if not (files := [file for file in path.rglob("*") if file.is_file()]):
                continue
            folders = tuple(sorted(path.glob("snapshots/*"))) or (path,)
            modified = max(file.stat().st_mtime for file in files)
            found.append(CachedRepository(repository.repo_id, path, folders, repository.size_on_disk, modified))
        return found

    def remove(self, repository: CachedRepository) -> None:
        """Remove a repository, in whichever layout of the cache it is."""
        shutil.rmtree(repository.path)


@contextmanager
def _bars(are_shown: bool) -> Iterator[None]:
    """Drop the library's progress bars, which it writes to standard error, unless they are to be shown."""
    with nullcontext() if are_shown else redirect_stderr(io.StringIO()):
        yield


def _client() -> tuple[Any, Any]:
    """Return the client of the hub and the module of its errors. Raises ConfigError where it is not installed."""
    check_extra("modelscope", "models from ModelScope need")
    import modelscope_hub
    from modelscope_hub import errors

    logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)  # it logs what it raises
    return modelscope_hub.HubApi(), errors


def _explain(name: str, revision: str | None, error: Exception) -> CheckpointError:
    """Return the one-line error for an error of the library."""
    _, errors = _client()
    label = f"modelscope:{name}" + (f" at revision {quoted(revision)}" if revision is not None else "")
    causes = list(getattr(error, "failed_files", {}).values()) or [error]
    for cause in causes:
        full = _root_os_error(cause)
        if full is not None:
            return disk_full(label, full, ModelScope.cache_variable)
    if isinstance(error, (errors.AuthenticationError, errors.PermissionDeniedError)):
        return CheckpointError(
            f"{label}: the hub does not let you read it", fix="set MODELSCOPE_API_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.NotExistError):
        return CheckpointError(
            f"{label} is no repository of ModelScope that you may see",
            fix="check the name and the revision; a private repository needs MODELSCOPE_API_TOKEN",
        )
    if isinstance(error, errors.NetworkError):
        return CheckpointError(
            f"{label} is not in the local cache, or not all of it, and the hub cannot be reached",
            actual=quoted(f"{type(error).__name__}: {error}"),
            fix="check the network connection, or name a local folder",
        )
    return CheckpointError(
        f"{label} could not be downloaded", actual=quoted(f"{type(causes[0]).__name__}: {causes[0]}"),
        fix="check network, disk space and access, then try again: it goes on where it ended",
    )  # fmt: skip


def _root_os_error(error: BaseException) -> OSError | None:
    """Return the operating system's error for a full or read-only disk among the causes of `error`, or None."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in DISK_ERRORS:
            return found
        found = found.__cause__ or found.__context__
    return None
