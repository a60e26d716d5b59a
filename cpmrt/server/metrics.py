"""Prometheus metrics of one server. All of it is on the event loop."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cpmrt.engine.sequence import Phase
from cpmrt.memory.kv_pages import PAGE_SIZE, pages_for
from cpmrt.server.engine_thread import Job
from cpmrt.server.mailbox import Ended

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_RUNNING = (Phase.PREFILL, Phase.DECODE)


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("cpmrt_requests", "HTTP requests", ["path", "status"], registry=registry)
        self._waiting = Gauge("cpmrt_sequences_waiting", "Sequences in the queue", registry=registry)
        self._running = Gauge("cpmrt_sequences_running", "Sequences that hold a slot", registry=registry)
        self._prompt = Counter("cpmrt_prompt_tokens", "Prompt tokens of ended sequences", registry=registry)
        self._cached = Counter("cpmrt_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry)
        self._generated = Counter("cpmrt_generated_tokens", "Tokens generated", registry=registry)
        self._first = Histogram(
            "cpmrt_time_to_first_token_seconds", "From request to first token", buckets=_SECONDS, registry=registry
        )
        self._per_token = Histogram(
            "cpmrt_time_per_output_token_seconds", "Mean of a sequence after its first token",
            buckets=_TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self._accept = Histogram(
            "cpmrt_accept_length", "Mean tokens of a speculative step of a sequence",
            buckets=(1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8), registry=registry,
        )  # fmt: skip
        self._steps = Counter("cpmrt_speculative_steps", "Speculative steps of ended sequences", registry=registry)
        self._step_tokens = Counter(
            "cpmrt_speculative_tokens", "Tokens that speculative steps gave to ended sequences", registry=registry
        )
        self._pages = Gauge(
            "cpmrt_kv_pages_used", f"KV pages ({PAGE_SIZE} tokens) of running sequences", registry=registry
        )

    def add_tokens(self, count: int) -> None:
        """Tokens that a step gave."""
        self._generated.inc(count)

    def add_ended(self, ended: Ended) -> None:
        """A sequence that has ended."""
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
        """The exposition format; `jobs` are those that are open now."""
        sequences = [job.sequence for job in jobs if job.sequence is not None]
        running = [seq for seq in sequences if seq.phase in _RUNNING]
        self._running.set(len(running))
        self._waiting.set(len(jobs) - len(running))
        resident = [seq.num_prefilled + len(seq.token_ids) for seq in running]
        self._pages.set(sum(map(pages_for, resident)))
        return generate_latest(self._registry)
