"""Measures at start how long steps take, by which the engine chooses between drafting and decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import ceil, inf
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
"""Seconds that the host may be busy elsewhere before the device has nothing to do."""
_PROMPT = (0,) * 64
"""A prompt long enough that its n-grams repeat, as prompt lookup needs."""

PassSeconds = Callable[[int], tuple[float, float]]


def measured_limits(
    executor: Executor, pass_seconds: PassSeconds, steps_per_launch: int, counts: Iterable[int]
) -> ExecutorLimits:
    """Return the executor's limits with `step_seconds` and `step_parts`, from steps of a sequence made for this, and
    with `several_seconds` of `counts` sequences.

    Nobody else may use the executor meanwhile. `pass_seconds(shape)` measures the passes of the draft and those of the
    target in a step that has just been run. A shape that the context is too short for seems to cost only the passes.

    The longer a step, the fewer may be in flight from then on, unless several are one launch: steps in flight when a
    sequence ends run before the next one's first token, and a draft step is chosen that many steps before its turn.
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
    several = tuple((count, _seconds_of_several(executor, count)) for count in counts)
    return replace(
        limits, run_ahead=run_ahead, step_seconds=(plain, *totals), step_parts=tuple(parts), several_seconds=several
    )


def enough_in_flight(step_s: float, at_most: int) -> int:
    """Return how many steps of `step_s` seconds have to be in flight to keep the device busy, limited to `at_most`."""
    return min(at_most, max(2, 1 + ceil(_COVERED_S / step_s)))


def _seconds(executor: Executor, step: Step) -> float:
    """Return the median time of steps of a new sequence."""
    _begin(executor, _SLOT)
    return _median_seconds(executor, step)


def _seconds_of_several(executor: Executor, count: int) -> tuple[float, ...]:
    """Return the seconds of a Decode step of `count` sequences, then of a Speculate step of each shape.

    They are infinite for a shape that does not take so many sequences.
    """
    limits, slots = executor.limits, tuple(range(count))
    for slot in slots:
        _begin(executor, slot)
    steps = {shape: Speculate(slots, shape) for shape in limits.shapes_for(count)}
    plain = _median_seconds(executor, Decode(slots))
    drafted = {shape: _median_seconds(executor, step) for shape, step in steps.items()}
    for slot in slots:
        executor.submit(Release(slot))
    return (plain, *(drafted.get(shape, inf) for shape in range(len(limits.tree_shapes))))


def _begin(executor: Executor, slot: int) -> None:
    limits = executor.limits
    prompt = _PROMPT[: max(1, min(limits.prefill_chunk, limits.max_context // 2))]
    executor.submit(Admit(slot, Sampling(), 0, limits.max_context - len(prompt), ()))
    executor.submit(Prefill(slot, prompt, 0, True)).wait()


def _median_seconds(executor: Executor, step: Step) -> float:
    """Return the median time of single steps, each waited for: the time that run-ahead hides is the same for all steps.
    """
    times = []
    for _ in range(_WARM_UP + _TIMED):
        begun = perf_counter()
        executor.submit(step).wait()
        times.append(perf_counter() - begun)
    return median(times[_WARM_UP:])


def launch_seconds(stream: Stream, launches: Callable[[], None]) -> float:
    """Return the seconds that launches take as one graph; they must have run before, so that kernels are loaded."""
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
