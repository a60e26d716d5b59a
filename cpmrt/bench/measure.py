"""Times prefill and decode of one model through the engine, the way an application drives it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Pages
from dataclasses import dataclass, field
from math import ceil
from operator import attrgetter
from os import sched_yield
from statistics import mean, median
from time import perf_counter

from cpmrt.bench.samples import Span
from cpmrt.bench.work import decode_bytes, prefill_flops
from cpmrt.config import ModelConfig, Sampling
from cpmrt.dtypes import F32, Array
from cpmrt.engine import Engine, Request, Sequence
from cpmrt.engine.stats import AcceptCounts
from cpmrt.executor import Admit, Decode, Executor, ExecutorLimits, Pending, Prefill, Speculate, Step, StepResult
from cpmrt.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Case:
    """One row of a benchmark: `sequences` prompts of `prompt_tokens` random tokens, each continued by `new_tokens`."""

    prompt_tokens: int
    new_tokens: int
    sequences: int = 1

    def __str__(self) -> str:
        return f"{self.prompt_tokens}:{self.new_tokens}" + (f":{self.sequences}" if self.sequences > 1 else "")


@dataclass
class Measurement:
    """Medians over the repeats of one case. Rates are totals over its sequences.

    `host_us_per_step` is the time the host spends on a decode step besides waiting for its result: submitting, reading
    the result, the engine and the benchmark's own clock; `host_us_p99` is the 99th percentile, in which the monitor's
    readings and Python's garbage collector show. `submit_us_per_step` is the part inside `Executor.submit`.
    `first_token_ms` is from a request to its first token. The spans are those of every repeat, in seconds of
    `perf_counter`. Figures of draft steps are as in `GenerationStats`, over all sequences; with `is_simulated` the
    accept lengths were forced, and so the decode rate is no measurement either.
    """

    case: Case
    prefill_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    prefill_tflops: float = 0.0
    first_token_ms: float = 0.0
    decode_tokens_per_s: float = 0.0
    step_ms_p50: float = 0.0
    step_ms_p99: float = 0.0
    decode_gb_per_s: float = 0.0
    host_us_per_step: float = 0.0
    host_us_p99: float = 0.0
    submit_us_per_step: float = 0.0
    num_decoded: int = 0
    is_simulated: bool = False
    mean_accept_length: float | None = None
    accept_histogram: tuple[int, ...] = ()
    accept_rates: tuple[float, ...] = ()
    draft_ms: float | None = None
    verify_ms: float | None = None
    rest_ms: float | None = None
    mean_rescored: float | None = None
    """Mean number of tokens whose logits a step with a screened head computed exactly; None: no step screened it."""
    step_ms: list[float] = field(default_factory=list, repr=False)
    prefill_spans: list[Span] = field(default_factory=list, repr=False)
    decode_spans: list[Span] = field(default_factory=list, repr=False)


def measure(
    executor: Executor,
    config: ModelConfig,
    case: Case,
    *,
    repeats: int,
    itemsize: int,
    tensors: tuple[TensorSpec, ...] | None = None,
    kv_bytes: int | None = None,
    adaptive: bool = True,
    simulated: bool = False,
    temperature: float = 0.0,
) -> Measurement:
    """Run the case once to warm up, then `repeats` times.

    `itemsize` is the bytes of a stored weight or KV element; `tensors` and `kv_bytes` are as in `work.decode_bytes`,
    `adaptive` as for the engine. With `simulated` the executor forces accept lengths. `temperature` 0 is greedy.
    Raises ContextLengthError if the case does not fit the executor's context.
    """
    runs = [
        _Run(executor, list(_requests(executor.limits, config, case, seed, temperature)), adaptive=adaptive)
        for seed in range(repeats + 1)
    ][1:]
    result = Measurement(case)
    result.prefill_s = median(run.prefill_s for run in runs)
    result.prefill_tokens_per_s = case.prompt_tokens * case.sequences / result.prefill_s
    flops = prefill_flops(config, case.prompt_tokens) * case.sequences
    result.prefill_tflops = flops / result.prefill_s / 1e12
    result.first_token_ms = median(ms for run in runs for ms in run.first_token_ms)
    result.prefill_spans = [(run.started, run.prefilled) for run in runs]
    accepts = AcceptCounts(executor.limits)
    for counts in (counts for run in runs for counts in run.accepts):
        accepts.merge(counts)
    vars(result).update(accepts.figures)
    result.is_simulated = simulated and result.mean_accept_length is not None
    rescored = [count for run in runs for count in run.rescored]
    result.mean_rescored = mean(rescored) if rescored else None
    runs = [run for run in runs if run.step_s]
    if runs:
        held = case.sequences, itemsize, tensors, kv_bytes
        _add_decode(result, runs, lambda run, rescored: decode_bytes(config, run.mean_context, *held, rescored))
    return result


def _add_decode(result: Measurement, runs: list[_Run], step_bytes: Callable[[_Run, float | None], int]) -> None:
    """Add the figures of decoding.

    `step_bytes(run, mean_rescored)` returns the bytes that a step of the run reads, as `work.decode_bytes` counts them.
    """
    result.step_ms = sorted(seconds * 1e3 for run in runs for seconds in run.step_s)
    result.step_ms_p50 = median(result.step_ms)
    result.step_ms_p99 = _p99(result.step_ms)
    result.decode_tokens_per_s = median(run.num_decoded / run.decode_s for run in runs)
    result.decode_gb_per_s = median(_read_bytes(run, step_bytes) / run.decode_s for run in runs) / 1e9
    host_us = sorted(seconds * 1e6 for run in runs for seconds in run.host_s)
    result.host_us_per_step, result.host_us_p99 = median(host_us), _p99(host_us)
    result.submit_us_per_step = median(seconds for run in runs for seconds in run.submit_s) * 1e6
    result.num_decoded = sum(run.num_decoded for run in runs)
    result.decode_spans = [(run.prefilled, run.prefilled + run.decode_s) for run in runs]


def _read_bytes(run: _Run, step_bytes: Callable[[_Run, float | None], int]) -> int:
    """Return the bytes that a run's decode steps read: some may screen the head, larger steps read it whole."""
    screened = len(run.rescored)
    whole = (len(run.step_s) - screened) * step_bytes(run, None)
    return whole + (screened * step_bytes(run, mean(run.rescored)) if screened else 0)


def _p99(ascending: list[float]) -> float:
    return ascending[ceil(len(ascending) * 0.99) - 1]


_finish_reason = attrgetter("finish_reason")


class _Run:
    """One pass over a case, timed by when the result of each step arrives.

    An executor works in order, so the time from one result to the next is the later step's own, as long as the engine
    keeps it busy. Decode counts from the moment every sequence has its first token until the first of them ends. Decode
    steps that run between the chunks of later prompts count nowhere.
    """

    def __init__(self, executor: Executor, requests: list[Request], *, adaptive: bool):
        self._times, self._waited_before = _TimedExecutor(executor), 0.0
        engine = Engine(self._times, self._note, adaptive=adaptive)
        self.prefill_s, self.step_s, self.host_s = 0.0, list[float](), list[float]()
        self.rescored: list[int] = []
        self._decodes = False
        self.started = self._last = perf_counter()
        sequences = [engine.add(request) for request in requests]
        while not all(seq.token_ids for seq in sequences):
            engine.advance()
        self.prefilled = self._last
        self._decodes = True
        at_start = sum(map(_context, sequences))
        while not any(map(_finish_reason, sequences)):
            engine.advance()
            for seq in sequences:
                seq.outbox.clear()
        at_end = sum(map(_context, sequences))
        self.num_decoded, self.decode_s = at_end - at_start, sum(self.step_s)
        self.submit_s = self._times.submit_s
        self.mean_context = (at_start + at_end) // (2 * len(requests))
        self._decodes = False
        while not all(map(_finish_reason, sequences)):
            engine.advance()
        for _ in range(executor.limits.run_ahead):
            engine.advance()  # steps beyond the end, which the next run would wait for
        self.accepts = [seq.accepts for seq in sequences if seq.accepts is not None]
        self.first_token_ms = [(seq.first_token_at - seq.added_at) * 1e3 for seq in sequences]

    def _note(self, step: Step, result: StepResult) -> None:
        now = perf_counter()
        if isinstance(step, (Admit, Prefill)):
            self.prefill_s += now - self._last
        elif self._decodes and isinstance(step, (Decode, Speculate)):
            self.step_s.append(now - self._last)
            self.host_s.append(now - self._last - (self._times.waited_s - self._waited_before))
            if result.num_rescored is not None:
                self.rescored.append(result.num_rescored)
        self._last, self._waited_before = now, self._times.waited_s


def _requests(
    limits: ExecutorLimits, config: ModelConfig, case: Case, seed: int, temperature: float
) -> Iterator[Request]:
    """Yield the requests of a case. Earlier ones get more new tokens, as they decode while later prompts are read."""
    source, chunks = random.Random(seed), -(-case.prompt_tokens // limits.prefill_chunk)
    room = max(case.new_tokens, limits.max_context - case.prompt_tokens)
    for later in reversed(range(case.sequences)):
        prompt = tuple(source.choices(range(config.vocab_size), k=case.prompt_tokens))
        count = min(case.new_tokens + later * chunks, room)
        yield Request(prompt, Sampling(temperature), seed, (), count)


def _context(seq: Sequence) -> int:
    return len(seq.request.prompt_ids) + len(seq.token_ids)


class _TimedExecutor:
    """An executor around another that times how long the host submits and how long it waits for results.

    `waited_s` is the sum of all waits, `submit_s` has the seconds of every submission of a decode step.
    """

    def __init__(self, executor: Executor):
        self._executor, self.waited_s, self.submit_s = executor, 0.0, list[float]()

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    def submit(self, step: Step) -> Pending:
        before = perf_counter()
        pending = self._executor.submit(step)
        if isinstance(step, (Decode, Speculate)):
            self.submit_s.append(perf_counter() - before)
        return _TimedPending(pending, self)

    def prompt_logits(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        return self._executor.prompt_logits(slot, token_ids, block_table)

    def prompt_states(self, slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...] = ()) -> Iterator[F32]:
        return self._executor.prompt_states(slot, token_ids, block_table)

    def read_pages(self, pages: Pages[int]) -> dict[str, Array]:
        return self._executor.read_pages(pages)

    def write_pages(self, pages: Pages[int], contents: Mapping[str, Array]) -> None:
        self._executor.write_pages(pages, contents)

    def close(self) -> None:
        self._executor.close()


class _TimedPending:
    def __init__(self, pending: Pending, times: _TimedExecutor):
        self._pending, self._times = pending, times

    def is_done(self) -> bool:
        return self._pending.is_done()

    def wait(self) -> StepResult:
        """Wait until the result is there, and time that; reading the result is not waiting."""
        before = perf_counter()
        while not self._pending.is_done():
            sched_yield()
            now = perf_counter()
            self._times.waited_s += now - before
            before = now
        return self._pending.wait()
