"""Prometheus metrics of a server, of the model it serves, of its process and of the GPU."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cpmrt import LLM, __version__
from cpmrt.engine.sequence import Phase
from cpmrt.gpu_readings import GpuReadings
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.server.engine_thread import Job
from cpmrt.sharing.jobs import Ended

METRICS_TYPE = CONTENT_TYPE_LATEST
_MODEL = "model_name"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_ACCEPT_LENGTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)
_GPU = {
    "memory_used_bytes": ("cpmrt_gpu_memory_used_bytes", "GPU memory in use, by all processes", 1.0),
    "power_w": ("cpmrt_gpu_power_watts", "Power that the GPU draws", 1.0),
    "energy_j": ("cpmrt_gpu_energy_joules", "Energy since the driver was loaded", 1.0),
    "utilisation_percent": ("cpmrt_gpu_utilisation_ratio", "Share of time in which a kernel ran", 0.01),
    "temperature_c": ("cpmrt_gpu_temperature_celsius", "Temperature of the GPU", 1.0),
}
"""A reading's name -> the name and description of its metric, and the factor from its unit to the metric's."""
_RUNNING = (Phase.PREFILL, Phase.DECODE, Phase.PAUSED)


def device_name(llm: LLM) -> str:
    """Return the name of the GPU that a model runs on, or "cpu"."""
    device = getattr(llm.executor, "device", None)
    return str(device.name) if device else "cpu"


class Metrics:
    """The metrics that `/metrics` shows. All but those of the process and the GPU are labelled with the model's name.

    `add_tokens`, `add_ended` and `add_request` are for the event loop; `text` is for any thread.
    """

    def __init__(self, model_name: str, max_queue: int) -> None:
        self._name = model_name
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._build = Info("cpmrt_build", "The version of cpmrt and what it runs on", registry=registry)
        self._build.info({"version": __version__, "python": platform.python_version()})
        self._describing = threading.Lock()
        self._is_described = False
        self._make_counters()
        self._make_gauges()
        self._make_histograms()
        self._queue_capacity.set(max_queue)

    def add_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._generated.inc(count)

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """Count an HTTP request that has ended."""
        self._requests.labels(self._name, path, str(status)).inc()
        self._request_seconds.labels(self._name, path).observe(seconds)

    def add_ended(self, ended: Ended) -> None:
        """Count a sequence that has ended."""
        stats = ended.stats
        self._ended.labels(self._name, ended.reason).inc()
        self._queued.observe(ended.queued_s)
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

    def text(self, jobs: tuple[Job, ...], llm: LLM | None) -> bytes:
        """Return all metrics in the exposition format.

        `jobs` are those that are open now; `llm` is None while the server takes no requests.
        """
        sequences = [job.sequence for job in jobs]
        running = [seq for seq in sequences if seq.phase in _RUNNING]
        loans = llm.engine.slots.loans if llm is not None else ()
        self._running.set(len(running) + len(loans))
        self._waiting.set(sum(seq.phase is Phase.WAITING for seq in sequences))
        self._ready.set(llm is not None)
        resident = [seq.num_written for seq in running] + [loan.num_tokens for loan in loans]
        self._pages.set(sum(map(pages_for, resident)))
        if llm is not None:
            self._describe(llm)
            if llm.engine.cache is not None:
                self._pages_held.set(llm.engine.cache.pool.num_held)
                self._pages_cached.set(llm.engine.cache.pool.num_cached)
        return generate_latest(self._registry)

    def _describe(self, llm: LLM) -> None:
        """Say once what does not change while a model is loaded."""
        with self._describing:
            if self._is_described:
                return
            self._is_described = True
            limits, device = llm.engine.limits, getattr(llm.executor, "device", None)
            self._slots.set(limits.max_sequences)
            self._num_pages.set(limits.num_pages or limits.max_sequences * pages_for(limits.max_context))
            self._max_context.set(limits.max_context)
            self._arena_bytes.set(llm.plan.total_bytes)
            facts = {"executor": "cuda" if device else "reference", "device": device_name(llm)}
            self._build.info({"version": __version__, "python": platform.python_version(), **facts})
            if device is not None:
                from cpmrt.cuda.bandwidth import pci_bus_id

                self._registry.register(GpuCollector(GpuReadings(pci_bus_id(device))))

    def _make_counters(self) -> None:
        counter = partial(_labelled, Counter, self._name, self._registry)
        self._requests = counter("cpmrt_requests", "HTTP requests", "path", "status")
        self._ended = counter("cpmrt_sequences_ended", "Sequences that have ended", "reason")
        self._prompt = counter("cpmrt_prompt_tokens", "Prompt tokens of ended sequences")
        self._cached = counter("cpmrt_cached_tokens", "Prompt tokens found in the prefix cache")
        self._generated = counter("cpmrt_generated_tokens", "Tokens generated")
        self._steps = counter("cpmrt_speculative_steps", "Speculative steps of ended sequences")
        self._step_tokens = counter("cpmrt_speculative_tokens", "Tokens that speculative steps gave to ended sequences")

    def _make_gauges(self) -> None:
        gauge = partial(_labelled, Gauge, self._name, self._registry)
        self._ready = gauge("cpmrt_ready", "1 while requests are taken, else 0")
        self._waiting = gauge("cpmrt_sequences_waiting", "Sequences in the queue")
        self._running = gauge("cpmrt_sequences_running", "Sequences and prompts to read that hold a slot")
        self._slots = gauge("cpmrt_slots", "Sequences that can run at a time")
        self._queue_capacity = gauge("cpmrt_queue_capacity", "Sequences that can wait")
        self._pages = gauge("cpmrt_kv_pages_used", f"KV pages ({PAGE_SIZE} tokens) that these fill")
        self._pages_held = gauge("cpmrt_kv_pages_held", "KV pages that running sequences have reserved")
        self._pages_cached = gauge("cpmrt_kv_pages_cached", "KV pages kept for prompts that begin alike")
        self._num_pages = gauge("cpmrt_kv_pages", "All KV pages")
        self._max_context = gauge("cpmrt_max_context_tokens", "Tokens that a sequence may have")
        self._arena_bytes = gauge("cpmrt_arena_bytes", "Memory for weights, KV pages and workspace")

    def _make_histograms(self) -> None:
        histogram = partial(_labelled, Histogram, self._name, self._registry, buckets=_SECONDS)
        self._request_seconds = histogram("cpmrt_request_seconds", "HTTP requests, from first to last byte", "path")
        self._queued = histogram("cpmrt_queue_seconds", "From request to slot")
        self._first = histogram("cpmrt_time_to_first_token_seconds", "From request to first token")
        self._per_token = histogram(
            "cpmrt_time_per_output_token_seconds", "Mean of a sequence after its first token", buckets=_TOKEN_SECONDS
        )
        self._accept = histogram(
            "cpmrt_accept_length", "Mean tokens of a speculative step of a sequence", buckets=_ACCEPT_LENGTHS
        )


def _labelled(
    kind: Any, model_name: str, registry: CollectorRegistry, name: str, text: str, *labels: str, **options: Any
) -> Any:
    """Return a metric labelled with the model's name; if it has no other labels, it is ready to be counted."""
    metric = kind(name, text, [_MODEL, *labels], registry=registry, **options)
    return metric if labels else metric.labels(model_name)


class GpuCollector(Collector):
    """The readings of a GPU, taken when somebody asks; those that it lacks are left out."""

    def __init__(self, readings: GpuReadings):
        self._readings = readings

    def describe(self) -> Iterable[Metric]:
        """Name nothing in advance, so that registering takes no reading."""
        return ()

    def collect(self) -> Iterator[Metric]:
        values = self._readings.read()
        if self._readings.memory_bytes is not None:
            yield GaugeMetricFamily("cpmrt_gpu_memory_bytes", "GPU memory", self._readings.memory_bytes)
        for reading, (name, text, unit) in _GPU.items():
            value = values.get(reading)
            if value is not None:
                family = CounterMetricFamily if reading == "energy_j" else GaugeMetricFamily
                yield family(name, text, value * unit)
