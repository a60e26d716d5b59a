"""The memory that the host can still give."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Return the free memory, or less where a limit of this process or of its control group leaves less.

    Linux: MemAvailable, which counts reclaimable page cache; elsewhere the physical memory. `root` is where the files
    of Linux are looked up.
    """
    return max(0, min(_of_machine(root), *_left_by_limits(root)))


def _of_machine(root: Path) -> int:
    found = _fields(root / "proc/meminfo").get("MemAvailable:")
    return found * 1024 if found is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_by_limits(root: Path) -> Iterator[int]:
    """Yield the bytes that RLIMIT_AS leaves, then those that the control group (version 2) and its parents leave."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    mapped = _first_number(root / "proc/self/statm")
    yield 2**63 if limit == resource.RLIM_INFINITY or mapped is None else limit - mapped * resource.getpagesize()
    own = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), "/")
    top = root / "sys/fs/cgroup"
    group = top / own.lstrip("/")
    for folder in (group, *group.parents):
        most, used = _first_number(folder / "memory.max"), _first_number(folder / "memory.current")
        if most is not None and used is not None:
            yield most - used + _fields(folder / "memory.stat").get("inactive_file", 0)
        if folder == top:
            return


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _first_number(path: Path) -> int | None:
    """Return the number that a file begins with; None without such a file, or where it says "max"."""
    words = " ".join(_lines(path)[:1]).split()
    return int(words[0]) if words and words[0].isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Return the lines "name number ..." of a file."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
