"""The Hugging Face hub, and mirrors that speak its protocol (HF_ENDPOINT), through `huggingface_hub`.

Cache, token (HF_TOKEN) and offline mode (HF_HUB_OFFLINE=1) are that library's. It is imported inside the functions
that use it: the import takes a third of a second, which a local model need not pay.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cpmrt import env
from cpmrt.errors import CheckpointError, quoted
from cpmrt.weights.repository import DISK_ERRORS, SUBFOLDERS, CachedRepository, disk_full, literal, shows_bars

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

_HASH_PIECE = 1 << 22


class HuggingFace:
    """The hub at HF_ENDPOINT (default: huggingface.co). A folder of its cache is named for a commit."""

    prefix = ""
    cache_variable = "HF_HOME"

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Return the folder of the newest commit of `revision` with the files that match; offline the cached one."""
        return _snapshot(name, revision, patterns, has_bars=False)

    def sizes(self, name: str, revision: str | None, folder: Path) -> Mapping[str, int]:
        """Return the sizes of all files of the commit that `folder` is named for, from one request.

        Raises CheckpointError, also offline.
        """
        from huggingface_hub import HfApi

        try:
            siblings = HfApi().model_info(name, revision=folder.name, files_metadata=True).siblings or []
        except Exception as error:
            raise _explain(name, revision, error) from error
        return {file.rfilename: file.size or 0 for file in siblings}

    def download(self, name: str, revision: str | None, folder: Path, files: Sequence[str]) -> None:
        """Fetch files of the commit that `folder` is named for, one by one, and link them into the folder.

        A file that is whole stays where a later one fails.
        """
        commit = folder.name
        try:
            with _bars(shows_bars()):
                for file in files:
                    _download_blob(name, commit, file, folder.parent.parent / "blobs")
        except CheckpointError:
            raise
        except Exception as error:
            raise _explain(name, revision, error) from error
        _snapshot(name, commit, literal(files), has_bars=shows_bars() and env.wants_parallel_transfer())

    def cached(self) -> list[CachedRepository]:
        """Return the models in the cache, their sizes with what interrupted downloads left; no data sets."""
        found = _scan()
        if found is None:
            return []
        whole = [
            CachedRepository(
                repository.repo_id, repository.repo_path,
                tuple(revision.snapshot_path for revision in repository.revisions),
                repository.size_on_disk + _num_bytes(repository.repo_path.glob("blobs/*.incomplete")),
                repository.last_modified,
            )
            for repository in found.repos if repository.repo_type == "model"
        ]  # fmt: skip
        return whole + _damaged({repository.path.name for repository in whole})

    def remove(self, repository: CachedRepository) -> None:
        """Remove a repository through the library, which knows the files that other repositories share with it."""
        found = _scan()
        if found and any(other.repo_path == repository.path for other in found.repos):
            found.delete_revisions(*(folder.name for folder in repository.folders)).execute()
        if repository.path.exists():  # the library ignores a damaged one, and one without revisions
            shutil.rmtree(repository.path)


def _damaged(known: Collection[str]) -> list[CachedRepository]:
    """Return the cached models that the library ignores because a revision of theirs lacks a file, or all files."""
    from huggingface_hub import constants

    paths = (path for path in Path(constants.HF_HUB_CACHE).expanduser().glob("models--*") if path.name not in known)
    return [
        CachedRepository(
            path.name.removeprefix("models--").replace("--", "/"), path,
            tuple(folder for folder in path.glob("snapshots/*") if all(file.exists() for file in folder.rglob("*"))),
            _num_bytes(file for file in path.rglob("*") if file.is_file() and not file.is_symlink()),
            path.stat().st_mtime,
        )
        for path in paths if path.is_dir() and not path.is_symlink()
    ]  # fmt: skip


def _num_bytes(files: Iterable[Path]) -> int:
    """Return the total size of files; one that another process removes meanwhile counts nothing."""
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _scan() -> HFCacheInfo | None:
    """Return what the library finds in its cache; None where there is no cache. Raises CheckpointError."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the cache {constants.HF_HUB_CACHE} cannot be read", expected="a folder", actual=quoted(str(error)),
            fix=f"set {HuggingFace.cache_variable} to a folder of yours",
        ) from error  # fmt: skip


def _download_blob(name: str, commit: str, file: str, blobs: Path) -> None:
    """Download a file into the cache's folder `blobs`, continuing what an interrupted call has left there.

    The library itself would begin such a file anew. Left to the library: a file without a hash, and one that its
    parallel transfer (xet) has, where the user asks for that.
    """
    from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.file_download import http_get

    url, token = hf_hub_url(name, file, revision=commit), get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    known = get_hf_file_metadata(url, headers=headers)
    is_parallel = known.xet_file_data is not None and env.wants_parallel_transfer()
    if is_parallel or known.etag is None or not re.fullmatch(r"[0-9a-f]{40,64}", known.etag):
        return
    blobs.mkdir(parents=True, exist_ok=True)
    blob, partial = blobs / known.etag, blobs / f"{known.etag}.incomplete"
    with partial.open("ab") as to:
        fcntl.flock(to, fcntl.LOCK_EX)  # another process may be fetching the same file
        if blob.exists():
            partial.unlink(missing_ok=True)
            return
        if known.size is not None and to.tell() > known.size:  # cannot be a part of this file
            to.seek(0)
            to.truncate()
        # The token is for the hub alone, not for a store to which the hub redirects the download.
        is_at_hub = urlsplit(known.location).netloc == urlsplit(constants.ENDPOINT).netloc
        http_get(
            known.location, to, resume_size=to.tell(), headers=headers if is_at_hub else {}, expected_size=known.size,
            displayed_filename=file,
        )  # fmt: skip
        to.flush()
        if len(known.etag) == 64 and _sha256(partial) != known.etag:
            partial.unlink()
            raise CheckpointError(
                f"{name}: {file} arrived damaged: its SHA-256 is not that of the hub", fix="download it again"
            )
        partial.replace(blob)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _snapshot(name: str, revision: str | None, patterns: Sequence[str], *, has_bars: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with _bars(has_bars):
            folder = snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), ignore_patterns=[SUBFOLDERS]
            )
    except Exception as error:  # transport errors are classes of whichever HTTP client the library uses
        raise _explain(name, revision, error) from error
    return Path(folder)


@contextmanager
def _bars(are_shown: bool) -> Iterator[None]:
    """Keep the library from drawing progress bars, unless they are to be shown."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _explain(repository: str, revision: str | None, error: Exception) -> CheckpointError:
    """Return the one-line error for an error of the library; the most special classes are tried first."""
    from huggingface_hub import constants, errors

    label = f"{repository} at revision {quoted(revision)}" if revision is not None else repository
    if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        error = error.__cause__
    for kind, what, fix in (
        (errors.GatedRepoError, f"{repository} is gated",
         f"accept its terms at {constants.ENDPOINT}/{repository} and set HF_TOKEN to your token"),
        (errors.RepositoryNotFoundError,
         f"{repository} is neither a local folder nor a repository of the hub that you may see",
         "check the name; a private repository needs HF_TOKEN"),
        (errors.RevisionNotFoundError, f"{repository} has no revision {quoted(revision)}",
         "name a branch, tag or commit of it"),
        (errors.OfflineModeIsEnabled, f"{label} is not in the local cache, or not all of it, and offline mode is on",
         "unset HF_HUB_OFFLINE to download it, or name a local folder"),
    ):  # fmt: skip
        if isinstance(error, kind):
            return CheckpointError(what, fix=fix)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return disk_full(repository, error, HuggingFace.cache_variable)
    if _status(error) == 401:
        return CheckpointError(
            f"{label}: the hub does not accept the token (401)", fix="set HF_TOKEN to a valid token, or unset it"
        )
    hub = urlsplit(constants.ENDPOINT)
    if hub.scheme not in ("http", "https") or not hub.netloc:
        return CheckpointError(
            "HF_ENDPOINT", expected="the URL of a hub, such as https://huggingface.co",
            actual=quoted(constants.ENDPOINT), fix=f"set it to one, or unset it, to fetch {label}",
        )  # fmt: skip
    if isinstance(error, errors.LocalEntryNotFoundError) or "Connect" in type(error).__name__:
        cause = error.__cause__ or error
        return CheckpointError(
            f"{label} is not in the local cache, or not all of it, and the hub {constants.ENDPOINT} cannot be reached",
            actual=quoted(f"{type(cause).__name__}: {cause}"),
            fix="check the network connection (HF_ENDPOINT names a mirror), or name a local folder",
        )
    return CheckpointError(
        f"{label} could not be downloaded",
        actual=f"{type(error).__name__}: {error}",
        fix="check network, disk space and access, then try again: whole files stay, and others go on where they ended",
    )


def _status(error: Exception) -> Any:
    return getattr(getattr(error, "response", None), "status_code", None)
