"""Limits the connections of a server: to fewer than the process may open files, with idle ones making room for new."""

from __future__ import annotations

import os
import resource
from typing import Protocol

MAX_CONNECTIONS = 4096
BACKLOG = 64
"""Connections that one turn of the event loop may accept."""
_SPARE_FILES = 32
_FEWEST = 8


class Connection(Protocol):
    def leave(self) -> None:
        """Close this connection, which has no request, for another one."""

    def refuse(self) -> None:
        """Tell the client to come again later, and close."""


class Connections:
    """Counts the connections of a server; `limit` at most stay open.

    A new connection beyond the limit takes the place of the one that has been idle longest; if all others have
    requests, the new one is refused.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._count = 0
        self._idle: dict[Connection, None] = {}
        """Connections without a request, the longest idle first."""

    def open(self, connection: Connection) -> None:
        """Count a new connection."""
        self._count += 1
        if self._count <= self.limit:
            self._idle[connection] = None
        elif self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._idle[connection] = None
            oldest.leave()
        else:
            connection.refuse()

    def close(self, connection: Connection) -> None:
        self._count -= 1
        self._idle.pop(connection, None)

    def begin_request(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def end_request(self, connection: Connection) -> None:
        self._idle[connection] = None


def connection_limit() -> int:
    """Return how many connections fit into the files that this process may open besides those that it has now."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    return max(_FEWEST, min(MAX_CONNECTIONS, allowed - num_open - BACKLOG - _SPARE_FILES))


def raise_file_limit() -> None:
    """Let this process open as many files as it may, up to what all connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS
    if soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
