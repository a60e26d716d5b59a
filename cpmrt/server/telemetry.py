"""Prometheus metrics, and the line that each request has in the log. For the event loop only."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cpmrt.engine.sequence import Phase
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.server.engine_thread import Ended, Job

METRICS_TYPE = CONTENT_TYPE_LATEST
_log = logging.getLogger("cpmrt.server")
_KEY = "cpmrt.record"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_ACCEPT_LENGTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)
_RUNNING = (Phase.PREFILL, Phase.DECODE)


class Metrics:
    """The metrics that `/metrics` shows."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("cpmrt_requests", "HTTP requests", ["path", "status"])
        self._waiting = gauge("cpmrt_sequences_waiting", "Sequences in the queue")
        self._running = gauge("cpmrt_sequences_running", "Sequences that hold a slot")
        self._prompt = counter("cpmrt_prompt_tokens", "Prompt tokens of ended sequences")
        self._cached = counter("cpmrt_cached_tokens", "Prompt tokens found in the prefix cache")
        self._generated = counter("cpmrt_generated_tokens", "Tokens generated")
        self._first = histogram("cpmrt_time_to_first_token_seconds", "From request to first token", buckets=_SECONDS)
        self._per_token = histogram(
            "cpmrt_time_per_output_token_seconds", "Mean of a sequence after its first token", buckets=_TOKEN_SECONDS
        )
        self._accept = histogram(
            "cpmrt_accept_length", "Mean tokens of a speculative step of a sequence", buckets=_ACCEPT_LENGTHS
        )
        self._steps = counter("cpmrt_speculative_steps", "Speculative steps of ended sequences")
        self._step_tokens = counter("cpmrt_speculative_tokens", "Tokens that speculative steps gave to ended sequences")
        self._pages = gauge("cpmrt_kv_pages_used", f"KV pages ({PAGE_SIZE} tokens) of running sequences")

    def add_tokens(self, count: int) -> None:
        self._generated.inc(count)

    def add_ended(self, ended: Ended) -> None:
        stats = ended.stats
        if not stats.new_tokens:
            return
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.cached_tokens)
        self._first.observe(ended.first_token_s)
        if stats.new_tokens > 1:
            self._per_token.observe(stats.decode_s / (stats.new_tokens - 1))
        if stats.mean_accept_length is not None:
            self._accept.observe(stats.mean_accept_length)
            self._steps.inc(stats.speculative_steps)
            self._step_tokens.inc(stats.speculative_tokens)

    def text(self, jobs: tuple[Job, ...]) -> bytes:
        """Return all metrics in the exposition format; `jobs` are those that are open now."""
        sequences = [job.sequence for job in jobs if job.sequence is not None]
        running = [seq for seq in sequences if seq.phase in _RUNNING]
        self._running.set(len(running))
        self._waiting.set(len(jobs) - len(running))
        resident = [seq.num_prefilled + len(seq.token_ids) for seq in running]
        self._pages.set(sum(map(pages_for, resident)))
        return generate_latest(self._registry)


@dataclass
class RequestRecord:
    """The line of one request in the log: id, status, tokens, times; no text of a prompt, unless that is asked for.

    `status` 499 means that the client went away.
    """

    id: str
    method: str
    path: str
    status: int = 0
    ended: Mapping[int, Ended] = field(default_factory=dict)
    """The choices of the request, as they end."""
    prompt: str | None = None
    begun_at: float = field(default_factory=perf_counter)

    def attach(self, scope: MutableMapping[str, Any]) -> None:
        """Make this the record of a request."""
        scope[_KEY] = self

    def write(self) -> None:
        # A path that is not printable could forge a line.
        path = self.path if self.path.isprintable() and len(self.path) <= 200 else repr(self.path[:200])
        parts = [self.id, str(self.status), self.method, path]
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


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    record: RequestRecord = scope[_KEY]
    return record
