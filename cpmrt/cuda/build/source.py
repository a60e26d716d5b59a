"""Finds the folder of the kernel sources and reads a file together with every header that it includes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from cpmrt import env
from cpmrt.errors import KernelCompileError

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One `.cu` file and the closure of its quoted includes, by the name they are included under."""

    file: str
    text: bytes
    headers: dict[str, bytes]

    @property
    def digest(self) -> str:
        """sha256 over the file and its headers: their names, lengths and contents."""
        sha = hashlib.sha256()
        for name, text in ((self.file, self.text), *sorted(self.headers.items())):
            sha.update(f"{name}\0{len(text)}\0".encode())
            sha.update(text)
        return sha.hexdigest()


def kernels_folder() -> Path:
    """Return the folder of the `.cu` files: `CPMRT_KERNELS_DIR`, else the installed package's, else the checkout's.

    Raises KernelCompileError if there is none, or if the variable names a folder without sources.
    """
    explicit = env.kernels_dir()
    package = Path(__file__).resolve().parents[2]
    candidates = [explicit] if explicit else [package / "kernels_cu", package.parent / "kernels_cu"]
    for folder in candidates:
        # A start asks this for every module: one look into a folder, and no walk through all of them.
        if (folder / "include").is_dir() or next(folder.glob("*.cu"), None) or next(folder.glob("*/*.cu"), None):
            return folder
    raise KernelCompileError(
        "no kernel sources",
        expected=f"*.cu in {' or '.join(map(str, candidates))}",
        fix="unset CPMRT_KERNELS_DIR or correct it" if explicit else "reinstall cpmrt, or set CPMRT_KERNELS_DIR",
    )


def read_source(file: str) -> KernelSource:
    """Read `file`, a path within the kernel folder, and its headers.

    A header is looked for beside the file that includes it, then in `include`. Raises KernelCompileError if one of them
    is missing or not readable.
    """
    return with_headers(file, _read(kernels_folder() / file, f"kernel source {file}"))


def with_headers(file: str, text: bytes) -> KernelSource:
    """Return `text` with its headers, as if it stood in the kernel folder as `file`. Raises as read_source does."""
    folder = kernels_folder()
    headers: dict[str, bytes] = {}
    pending = [(folder / file, name) for name in _included(text)]
    while pending:
        includer, name = pending.pop()
        if name in headers:
            continue
        beside = includer.parent / name
        path = beside if beside.is_file() else folder / "include" / name
        headers[name] = _read(path, f'header "{name}", which {includer.name} includes,')
        pending += [(path, inner) for inner in _included(headers[name])]
    return KernelSource(file, text, headers)


def _included(text: bytes) -> list[str]:
    return [name.decode("utf-8", "replace") for name in _INCLUDE.findall(text)]


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fix = "CUDA's own headers are included with <...>; otherwise reinstall cpmrt or correct CPMRT_KERNELS_DIR"
        raise KernelCompileError(f"{what} cannot be read: {path}: {error.strerror}", fix=fix) from None
