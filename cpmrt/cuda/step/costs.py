"""What steps cost, by which the engine chooses between drafting and decoding: measured at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from cpmrt.config import Sampling
from cpmrt.cuda.driver.graphs import Graphs
from cpmrt.executor import Admit, Decode, Executor, ExecutorLimits, Prefill, Release, Speculate, Step, StepParts

if TYPE_CHECKING:
    from cupy.cuda import Stream

_SLOT, _WARM_UP, _TIMED = 0, 2, 5
_COVERED_S = 1e-3
"""The host may be busy elsewhere for so long before the device has nothing to do."""
_PROMPT = (0,) * 64
"""A prompt so long that n-grams repeat."""

PassSeconds = Callable[[int], tuple[float, float]]


def measured_limits(executor: Executor, pass_seconds: PassSeconds, steps_per_launch: int) -> ExecutorLimits:
    """Return the executor's limits with `step_seconds` and `step_parts`, from steps of a sequence made for this.

    Nobody else may use the executor meanwhile. `pass_seconds(shape)` measures the passes of the draft and those of the
    target in a step that has just been run. A shape that the context is too short for seems to cost only the passes.

    Of long steps fewer may be in flight from then on, unless several are one launch: what is in flight when a sequence
    ends runs before the next one's first token, and a draft step is chosen that much before its turn.
    """
    limits = executor.limits
    plain, parts, totals = _seconds(executor, Decode((_SLOT,))), list[StepParts](), list[float]()
    for shape in range(len(limits.tree_shapes)):
        total = _seconds(executor, Speculate((_SLOT,), shape))
        draft_s, verify_s = pass_seconds(shape)
        totals.append(total)
        parts.append(StepParts(draft_s, verify_s, max(total - draft_s - verify_s, 0.0)))
    executor.submit(Release(_SLOT))
    run_ahead = limits.run_ahead if steps_per_launch > 1 else enough_in_flight(plain, limits.run_ahead)
    return replace(limits, run_ahead=run_ahead, step_seconds=(plain, *totals), step_parts=tuple(parts))


def enough_in_flight(step_s: float, at_most: int) -> int:
    """Return how many steps of so many seconds keep the device busy."""
    return min(at_most, max(2, 1 + ceil(_COVERED_S / step_s)))


def _seconds(executor: Executor, step: Step) -> float:
    """Return the median time of single steps, each waited for: what run-ahead hides is alike for all."""
    limits = executor.limits
    prompt = _PROMPT[: max(1, min(limits.prefill_chunk, limits.max_context // 2))]
    executor.submit(Admit(_SLOT, Sampling(), 0, limits.max_context - len(prompt), ()))
    executor.submit(Prefill(_SLOT, prompt, 0, True)).wait()
    times = []
    for _ in range(_WARM_UP + _TIMED):
        begun = perf_counter()
        executor.submit(step).wait()
        times.append(perf_counter() - begun)
    return median(times[_WARM_UP:])


def launch_seconds(stream: Stream, launches: Callable[[], None]) -> float:
    """Return the time of launches that have run before, as one graph."""
    import cupy

    graphs = Graphs(stream, enabled=True)
    graphs.add("timed", launches)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for begun in range(_WARM_UP + _TIMED):
        if begun == _WARM_UP:
            start.record(stream)
        graphs.run("timed")
    end.record(stream)
    end.synchronize()
    graphs.close()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3 / _TIMED
