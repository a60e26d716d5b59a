"""The cache of compiled kernels: one file a cubin, whose name says what it was made from and what it holds.

`<cache>/cubins/<key>.<compiler>.<content>.cubin`: `key` is the sha256 of the sources and options, `compiler` the NVRTC
version, `content` the start of the sha256 of the file itself. So one rename publishes a cubin together with its
checksum, whatever other processes do, and a truncated or altered file does not match its own name. Files of other kinds
hold what was found out about a library's kernels; the library's version stands in place of the compiler's.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from cpmrt import env
from cpmrt.errors import ConfigError, reason_of

CUBIN = "cubin"
_CONTENT_DIGITS = 32


def find(key: str, compiler: str | None, kind: str = CUBIN) -> Path | None:
    """Return the intact file of `key`, by any compiler if `compiler` is None; damaged ones are removed."""
    for target in _folders():
        for name in sorted(_names(target).get(key, ()), reverse=True):
            if _is_wanted(name.removeprefix(f"{key}."), compiler, kind):
                if _is_intact(target / name):
                    return target / name
                _remove(target / name)
    return None


def _is_wanted(rest: str, compiler: str | None, kind: str) -> bool:
    """Tell whether `rest`, all after the key in a file's name, fits a file of `kind` by `compiler` (None: by any)."""
    made_by, *others = rest.rsplit(".", 2)
    return len(others) == 2 and others[1] == kind and compiler in (None, made_by)


def _names(target: Path) -> dict[str, list[str]]:
    """Return the names in the cache by their keys, read again only when the folder has changed: a start asks often."""
    try:
        changed = target.stat().st_mtime_ns
    except OSError:
        return {}
    known = _listed.get(target)  # another thread may take it away at any time
    if known is None or known[0] != changed:
        names = dict[str, list[str]]()
        for name in os.listdir(target):
            names.setdefault(name.partition(".")[0], []).append(name)
        known = _listed[target] = changed, names
    return known[1]


_listed: dict[Path, tuple[int, dict[str, list[str]]]] = {}


def store(key: str, compiler: str, cubin: bytes, *, must_last: bool = False) -> Path:
    """Publish a cubin atomically. Where the cache cannot be written, it goes to a folder that dies with the process.

    With `must_last` a cache that cannot be written raises ConfigError instead.
    """
    name = f"{key}.{compiler}.{_digest(cubin)}.{CUBIN}"
    target = _lasting_folder() if must_last else folder()
    try:
        return _write(target, name, cubin)
    except OSError as error:
        if must_last:
            raise _not_kept(target, error) from error
        return _write(_temporary_folder(target, error), name, cubin)


def check_writable() -> None:
    """Raise ConfigError if what is stored now would die with the process."""
    target = _lasting_folder()
    try:
        target.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target).close()
    except OSError as error:
        raise _not_kept(target, error) from error


def _not_kept(target: Path, error: OSError) -> ConfigError:
    what = f"compiled kernels cannot be kept in {target}: {reason_of(error)}"
    return ConfigError(what, fix="set CPMRT_CACHE_DIR to a folder that can be written")


def keep(key: str, version: str, content: bytes, kind: str) -> None:
    """Publish a finding about a library's kernels if the cache can be written; else each start makes it again."""
    with suppress(OSError):
        _write(folder(), f"{key}.{version}.{_digest(content)}.{kind}", content)


def folder() -> Path:
    """Return the folder in which cubins are kept."""
    return _folders()[0]


def cubins() -> dict[Path, int]:
    """Return the bytes of each cubin that is kept. A folder that cannot be read has none."""
    sizes = dict[Path, int]()
    with suppress(OSError), os.scandir(folder()) as entries:
        for entry in entries:
            with suppress(OSError):  # another process may just have removed it
                if entry.name.endswith(f".{CUBIN}"):
                    sizes[Path(entry)] = entry.stat().st_size
    return sizes


def _folders() -> tuple[Path, ...]:
    """Return the folders to look for cubins in. New ones go to the first; a second one cannot be written."""
    configured = _lasting_folder()
    stand_in = _stand_ins.get(configured)
    return (Path(stand_in.name), configured) if stand_in else (configured,)


def _lasting_folder() -> Path:
    return env.cache_dir() / "cubins"


_stand_ins: dict[Path, tempfile.TemporaryDirectory[str]] = {}
_stand_ins_lock = threading.Lock()


def _temporary_folder(configured: Path, error: OSError) -> Path:
    with _stand_ins_lock:
        if configured not in _stand_ins:
            _stand_ins[configured] = tempfile.TemporaryDirectory(prefix="cpmrt-cubins-")
            warnings.warn(
                f"compiled kernels cannot be kept in {configured} ({error.strerror}) and will be compiled again at "
                "the next start; set CPMRT_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )
        return Path(_stand_ins[configured].name)


def _write(target: Path, name: str, content: bytes) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=".unfinished-", dir=target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target / name)
        _listed.pop(target, None)  # files of the same clock tick do not change the folder's time
    except BaseException:
        _remove(Path(unfinished))
        raise
    return target / name


def _is_intact(path: Path) -> bool:
    try:
        return path.name.split(".")[-2] == _digest(path.read_bytes())
    except OSError:
        return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_CONTENT_DIGITS]


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
