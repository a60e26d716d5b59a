"""The environment variables that cpmrt reads. No other file touches `os.environ`."""

from __future__ import annotations

import os
from pathlib import Path


def _home() -> Path:
    """Return the user's home folder; for a user without one the root folder, as container runtimes do."""
    found = os.path.expanduser("~")
    return Path(found if found != "~" else "/")


def set_home() -> None:
    """Set `HOME` if it is unset: without it the clients of the hubs fail, or make a folder named ~."""
    os.environ.setdefault("HOME", str(_home()))


def expanded(name: str | Path) -> str:
    """Return a path that a user names, with the home folder for a `~` in front. A name that no user can have stays as
    it is, so that whoever opens the path says what is wrong."""
    try:
        return os.path.expanduser(name)
    except ValueError:
        return str(name)


def _folder(variable: str) -> Path | None:
    """Return the folder that a variable names, None if it is unset or empty.

    A `~` in front is the home folder, also where no shell has replaced it, as in a unit file of systemd.
    """
    name = os.environ.get(variable)
    if not name:
        return None
    return _home() / name[2:] if name.startswith("~/") else Path(os.path.expanduser(name))


def cache_dir() -> Path:
    """Return the folder of compiled kernels: `CPMRT_CACHE_DIR`, `$XDG_CACHE_HOME/cpmrt` or `~/.cache/cpmrt`."""
    return _folder("CPMRT_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "cpmrt"


def state_dir() -> Path:
    """Return the folder of state between runs: `CPMRT_STATE_DIR`, `$XDG_STATE_HOME/cpmrt` or `~/.local/state/cpmrt`."""
    explicit = _folder("CPMRT_STATE_DIR")
    return explicit or Path(os.environ.get("XDG_STATE_HOME") or _home() / ".local" / "state") / "cpmrt"


def kernels_dir() -> Path | None:
    """Return the folder to take CUDA sources from instead of the installed ones: `CPMRT_KERNELS_DIR`; None if unset."""
    return _folder("CPMRT_KERNELS_DIR")


def asks_for_portable_kernels() -> bool:
    """Tell whether a newer GPU shall run the kernels of sm_80 to sm_89, for tests: `CPMRT_PORTABLE`, if not "" or 0."""
    return os.environ.get("CPMRT_PORTABLE", "") not in ("", "0")


def api_key() -> str | None:
    """Return the key that clients of `cpmrt serve` must send: `CPMRT_API_KEY`; None if unset or empty."""
    return os.environ.get("CPMRT_API_KEY") or None


def is_hub_offline() -> bool:
    """Tell whether no hub may be asked: `HF_HUB_OFFLINE`, in the values that huggingface_hub takes for yes."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def notify_socket() -> str | None:
    """Return the socket on which systemd waits for news of a service: `NOTIFY_SOCKET`; None if unset or empty."""
    return os.environ.get("NOTIFY_SOCKET") or None


def wants_parallel_transfer() -> bool:
    """Tell whether huggingface_hub shall take all bandwidth and cores: `HF_XET_HIGH_PERFORMANCE`, its own variable."""
    return os.environ.get("HF_XET_HIGH_PERFORMANCE", "").upper() in ("1", "ON", "YES", "TRUE")


def cupy_cache_dir() -> Path:
    """Return CuPy's own cache, which it creates on import: `CUPY_CACHE_DIR`, else `~/.cupy/kernel_cache`."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or _home() / ".cupy/kernel_cache")


def set_cupy_cache_dir(folder: Path) -> None:
    """Make CuPy, where it is not imported yet, keep its cache in `folder`."""
    os.environ["CUPY_CACHE_DIR"] = str(folder)
