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


def kernels_dir() -> Path | None:
    """Where to take the CUDA sources from instead of the installed ones: `CPMRT_KERNELS_DIR`; None if unset."""
    explicit = os.environ.get("CPMRT_KERNELS_DIR")
    return Path(explicit) if explicit else None


def asks_for_portable_kernels() -> bool:
    """Whether a newer GPU runs what sm_80 to sm_89 run, to test and time it: `CPMRT_PORTABLE`, if not empty or 0."""
    return os.environ.get("CPMRT_PORTABLE", "") not in ("", "0")


def api_key() -> str | None:
    """What clients of `cpmrt serve` must send: `CPMRT_API_KEY`; None if unset or empty."""
    return os.environ.get("CPMRT_API_KEY") or None


def cupy_cache_dir() -> Path:
    """CuPy's own cache, which it creates on import: `CUPY_CACHE_DIR`, else `~/.cupy/kernel_cache`."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))


def set_cupy_cache_dir(folder: Path) -> None:
    """Make CuPy, where it is not imported yet, keep its cache in `folder`."""
    os.environ["CUPY_CACHE_DIR"] = str(folder)
