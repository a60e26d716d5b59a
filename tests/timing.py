"""Measures of the time that code takes which other work on the machine disturbs little, and waiting for an event."""

from __future__ import annotations

import time
from collections.abc import Callable

REFERENCE_LOOP_S = 0.15
"""Seconds that the loop of `slowness` takes with CPython 3.11 on the core for which time limits were set."""


def least_cpu_seconds(action: Callable[[], object], enough: float, tries: int = 6) -> float:
    """Return the fewest CPU seconds that this process needs for `action`; stop trying once they are below `enough`."""
    found: list[float] = []
    while len(found) < tries and min(found, default=enough) >= enough:
        begun = time.process_time()
        action()
        found.append(time.process_time() - begun)
    return min(found)


def slowness(clock: Callable[[], float]) -> float:
    """Return how many times longer than REFERENCE_LOOP_S this core takes for the same loop now; at least 1.

    With `time.process_time` it tells how slow the core is, with `time.perf_counter` also how much else it does.
    """
    begun, table = clock(), {}
    for i in range(2_000_000):
        table[i & 1023] = i * 3
    return max(1.0, (clock() - begun) / REFERENCE_LOOP_S)


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until `condition()` is true. Fails after `timeout_s` seconds, which only guard against hanging."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
