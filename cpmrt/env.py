"""Every environment variable that cpmrt reads. No other file touches `os.environ`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where compiled kernels are kept: `CPMRT_CACHE_DIR`, else `$XDG_CACHE_HOME/cpmrt`, else `~/.cache/cpmrt`."""
    explicit = os.environ.get("CPMRT_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpmrt"
