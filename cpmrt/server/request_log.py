"""One line a request: id, status, tokens, times. No text of a prompt, unless it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from cpmrt.server.mailbox import Ended

_log = logging.getLogger("cpmrt.server")
_KEY = "cpmrt.record"


@dataclass
class RequestRecord:
    """What is known of a request when it has been answered. `status` 499: the client went away."""

    id: str
    method: str
    path: str
    status: int = 0
    ended: Mapping[int, Ended] = field(default_factory=dict)
    """The choices of the request, as they end."""
    prompt: str | None = None
    begun_at: float = field(default_factory=perf_counter)

    def write(self) -> None:
        """The line."""
        parts = [self.id, str(self.status), self.method, _quoted(self.path)]
        if self.ended:
            first, stats = next(iter(self.ended.values())), [ended.stats for ended in self.ended.values()]
            parts.append(f"prompt={stats[0].prompt_tokens} cached={stats[0].cached_tokens}")
            parts.append(f"new={sum(each.new_tokens for each in stats)}")
            parts.append("end=" + ",".join(sorted({ended.reason for ended in self.ended.values()})))
            parts.append(f"queued={first.queued_s:.3f}s first={first.first_token_s:.3f}s")
        parts.append(f"total={perf_counter() - self.begun_at:.3f}s")
        if self.prompt is not None:
            parts.append(f"prompt_text={self.prompt!r}")
        _log.info(" ".join(parts))


def attach(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    """Make it the record of this request."""
    scope[_KEY] = record


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """The record that was attached."""
    record: RequestRecord = scope[_KEY]
    return record


def _quoted(path: str) -> str:
    """A path cannot forge a line of the log."""
    return path if path.isprintable() and len(path) <= 200 else repr(path[:200])
