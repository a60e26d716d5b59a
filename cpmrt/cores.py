"""The number of processor cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores, which may be fewer than the machine has: containers and `taskset` say so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
