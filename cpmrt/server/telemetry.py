"""The line that each request has in the log. For the event loop only."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from starlette.types import Send

from cpmrt.sharing.jobs import Ended

_log = logging.getLogger("cpmrt.server")
_KEY = "cpmrt.record"
MAX_LOGGED_PROMPT = 16 * 1024
"""Bytes of a request's body that --log-prompts writes."""


@dataclass
class RequestRecord:
    """The line of one request in the log: client, id, status, tokens, times; no prompt, unless that is asked for.

    `client` is the address and port at the other end of the connection, a proxy's where there is one. `status` 499
    means that the client went away.
    """

    client: str
    id: str
    method: str
    path: str
    send: Send = field(repr=False)
    """The server's own `send`: streams use it after the beginning of an answer, past the application's layers."""
    status: int = 0
    ended: Mapping[int, Ended] = field(default_factory=dict)
    """The choices of the request, as they end."""
    prompt: bytes | None = None
    begun_at: float = field(default_factory=perf_counter)

    def attach(self, scope: MutableMapping[str, Any]) -> None:
        """Make this the record of a request."""
        scope[_KEY] = self

    def detach(self, scope: MutableMapping[str, Any]) -> None:
        """Break a cycle of references: `send` knows the scope, which would stay with its request until a collection."""
        del scope[_KEY]

    def write(self) -> None:
        # A path that is not printable could forge a line.
        path = self.path if self.path.isprintable() and len(self.path) <= 200 else repr(self.path[:200])
        parts = [self.client, self.id, str(self.status), self.method, path]
        if self.ended:
            first, stats = next(iter(self.ended.values())), [ended.stats for ended in self.ended.values()]
            parts.append(f"prompt={stats[0].prompt_tokens} cached={stats[0].cached_tokens}")
            parts.append(f"new={sum(each.new_tokens for each in stats)}")
            parts.append("end=" + ",".join(sorted({ended.reason for ended in self.ended.values()})))
            parts.append(f"queued={first.queued_s:.3f}s first={first.first_token_s:.3f}s")
        parts.append(f"total={perf_counter() - self.begun_at:.3f}s")
        line = " ".join(parts)
        if self.prompt is None:
            _log.info(line)
        else:
            _log.info("%s prompt_text=%r", line, self.prompt.decode("utf-8", "replace"))


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    record: RequestRecord = scope[_KEY]
    return record
