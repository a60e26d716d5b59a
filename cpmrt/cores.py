"""The number of processor cores that this process may use, and work that threads on them do ahead of its use."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
MOST_THREADS = 8
"""The most threads that `computed_ahead` starts if it is not told otherwise: results wait in memory for their use."""


def usable_cores() -> int:
    """Return the number of cores, which may be fewer than the machine has: containers and `taskset` say so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def computed_ahead(jobs: Iterable[Callable[[], T]], *, most_threads: int = MOST_THREADS) -> Iterator[T]:
    """Yield the result of each job, in their order, while threads, at most one a core, compute the next ones.

    At most two jobs a thread are under way. A job may be computed twice where the system starts no more threads.
    """
    threads, pending = min(most_threads, usable_cores()), deque[Future[T]]()
    with ThreadPoolExecutor(threads, thread_name_prefix="cpmrt-ahead") as pool:
        for job in jobs:
            pending.append(_begun(pool, job))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _begun(pool: ThreadPoolExecutor, job: Callable[[], T]) -> Future[T]:
    """Have a thread compute, or compute here if the system starts none: its stack counts against a memory limit."""
    try:
        return pool.submit(job)
    except RuntimeError:
        done = Future[T]()
        done.set_result(job())
        return done
