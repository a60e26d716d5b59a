"""A folder of prefix files of limited size, in which the least recently used files are dropped first."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

MAX_BYTES = 16 << 30
MAX_NOTES = 4096
ABANDONED_S = 3600
"""Seconds without a write after which a temporary file counts as abandoned: the process that wrote it was killed."""
_SUFFIX, _MET = ".prefix", ".met"


class PrefixFolder:
    """Names the files by model and tokens, and keeps them within `max_bytes` together. Processes may share it."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES):
        self._folder, self._max_bytes = folder, max_bytes
        self.name = str(folder)

    def path_of(self, fingerprint: str, token_ids: tuple[int, ...]) -> Path:
        """Return the path of the file of these tokens, which need not exist; the folder is made. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tokens = hashlib.sha256(np.array(token_ids, "<i8").tobytes()).hexdigest()
        return self._folder / f"{fingerprint[:16]}-{tokens[:32]}{_SUFFIX}"

    def use(self, path: Path) -> bool:
        """Note that a file is used now; return whether it is there. Raises OSError."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def was_met(self, path: Path) -> bool:
        """Return whether this was called before for the same missing file, by any process. Raises OSError.

        The first call leaves an empty file, a note, beside its place. Of more than MAX_NOTES notes the older half is
        removed.
        """
        try:
            path.with_suffix(_MET).touch(exist_ok=False)
        except FileExistsError:
            return True
        notes = list(self._folder.glob(f"*{_MET}"))
        if len(notes) > MAX_NOTES:
            for note in sorted(notes, key=_last_used)[: len(notes) // 2]:
                note.unlink(missing_ok=True)
        return False

    def trim(self, keep: Path) -> None:
        """Remove the least recently used files until the rest fits; `keep` stays. Raises OSError.

        Temporary files that a PrefixWriter of a killed process has left behind are removed too.
        """
        for path in self._folder.glob(f".*{_SUFFIX}.*"):
            if _last_used(path) < (time.time() - ABANDONED_S) * 1e9:
                path.unlink(missing_ok=True)
        others = [path for path in self._folder.glob(f"*{_SUFFIX}") if path != keep]
        total = keep.stat().st_size
        for path in sorted(others, key=_last_used, reverse=True):
            with suppress(FileNotFoundError):  # another process was faster
                total += path.stat().st_size
                if total > self._max_bytes:
                    path.unlink()


def _last_used(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
