"""How long something takes, whatever else the machine does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

REFERENCE_LOOP_S = 0.15
"""What `slowness` runs takes so long on the core that limits were set on, with CPython 3.11."""


def least_cpu_seconds(action: Callable[[], object], enough: float, tries: int = 6) -> float:
    """CPU seconds that this process needs for it: the least of several tries, of which `enough` is the last."""
    found: list[float] = []
    while len(found) < tries and min(found, default=enough) >= enough:
        begun = time.process_time()
        action()
        found.append(time.process_time() - begun)
    return min(found)


def slowness(clock: Callable[[], float]) -> float:
    """How many times longer than there this core takes for plain Python just now; at least 1.

    By `time.process_time` it tells how slow the core is, by `time.perf_counter` also how much else it does.
    """
    begun, table = clock(), {}
    for i in range(2_000_000):
        table[i & 1023] = i * 3
    return max(1.0, (clock() - begun) / REFERENCE_LOOP_S)
