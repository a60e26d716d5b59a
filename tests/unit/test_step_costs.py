"""What steps cost, as an executor measures it at start: on a scripted executor, by a clock that only its steps move."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest

from cpmrt.config import TreeShape
from cpmrt.cuda.step import costs
from cpmrt.cuda.step.costs import enough_in_flight, measured_limits
from cpmrt.executor import Admit, Decode, ExecutorLimits, Prefill, Release, Speculate, StepResult

SHAPES = (TreeShape(2, 10, 12), TreeShape.chain(3))
SURPLUS_S = (1.0, 1.0, -2e-4, -1e-4, 0.0, 1e-4, 2e-4)
"""How much longer each of several equal steps takes in a row: the first two as kernels are loaded and clocks rise."""


class Clocked:
    """An executor whose steps take as long as they are said to, once they are waited for."""

    def __init__(self, limits, seconds):
        self.limits, self._seconds = limits, seconds
        self.now, self._row = 0.0, (None, 0)
        self.held, self.prompts = set(), []

    def submit(self, step):
        if isinstance(step, Admit):
            self.held.add(step.slot)
        elif isinstance(step, Release):
            self.held.remove(step.slot)
        elif isinstance(step, Prefill):
            self.prompts.append(step.token_ids)
        return SimpleNamespace(wait=lambda: self._run(step))

    def _run(self, step):
        if isinstance(step, (Decode, Speculate)):
            assert self.held.issuperset(step.slots), "a step of a slot without a sequence"
            self._row = step, self._row[1] + 1 if self._row[0] == step else 1
            kind = step.shape if isinstance(step, Speculate) else None
            self.now += self._seconds[len(step.slots), kind] + SURPLUS_S[self._row[1] - 1]
        return StepResult()


def measured(monkeypatch, seconds, *, passes=(0.0, 0.0), steps_per_launch=1, counts=(), **limits):
    limits = {"max_sequences": 4, "max_context": 4096, "prefill_chunk": 512, "run_ahead": 8} | limits
    executor = Clocked(ExecutorLimits(**limits), seconds)
    monkeypatch.setattr(costs, "perf_counter", lambda: executor.now)
    found = measured_limits(executor, lambda shape: passes, steps_per_launch, counts)
    assert not executor.held, "slots that nobody can have any more"
    return found, executor


def test_steps_of_every_shape_are_timed_when_they_are_warm(monkeypatch):
    seconds = {(1, None): 0.004, (1, 0): 0.009, (1, 1): 0.006}
    found, _ = measured(monkeypatch, seconds, passes=(0.002, 0.003), tree_shapes=SHAPES)
    assert found.step_seconds == pytest.approx((0.004, 0.009, 0.006))
    parts = [(part.draft_s, part.verify_s, part.rest_s) for part in found.step_parts]
    assert parts == [pytest.approx((0.002, 0.003, 0.004)), pytest.approx((0.002, 0.003, 0.001))]


def test_passes_that_took_longer_than_their_step_leave_no_time_below_zero(monkeypatch):
    found, _ = measured(monkeypatch, {(1, None): 0.004, (1, 0): 0.004}, passes=(0.002, 0.003), tree_shapes=SHAPES[:1])
    assert found.step_parts[0].rest_s == 0


def test_several_sequences_cost_what_their_steps_take_and_a_shape_for_fewer_is_never_worth_it(monkeypatch):
    seconds = {(1, None): 0.004, (1, 0): 0.009, (1, 1): 0.006, (2, None): 0.005, (2, 1): 0.007, (4, None): 0.008}
    found, _ = measured(monkeypatch, seconds, counts=(2, 4), tree_shapes=SHAPES, max_drafting=(1, 2))
    assert [count for count, _ in found.several_seconds] == [2, 4]
    assert found.seconds_for(2) == (pytest.approx(0.005), inf, pytest.approx(0.007))
    assert found.seconds_for(3) == (pytest.approx(0.008), inf, inf)


def test_the_prompt_of_the_measurement_fits_a_small_context_and_a_small_chunk(monkeypatch):
    seconds = {(1, None): 0.004}
    for limits, longest in (({"max_context": 40}, 20), ({"prefill_chunk": 16}, 16), ({"max_context": 1}, 1)):
        _, executor = measured(monkeypatch, seconds, **limits)
        assert {len(prompt) for prompt in executor.prompts} == {longest}


@pytest.mark.parametrize(("step_ms", "at_most", "expected"), [
    (20, 8, 2), (1, 8, 2), (0.5, 8, 3), (0.3, 8, 5), (0.1, 8, 8), (0.1, 16, 11), (20, 1, 1),
])  # fmt: skip
def test_the_steps_behind_the_one_that_runs_last_a_millisecond(step_ms, at_most, expected):
    assert enough_in_flight(step_ms / 1e3, at_most) == expected


@pytest.mark.parametrize(("steps_per_launch", "expected"), [(1, 2), (2, 8)])
def test_long_steps_are_not_sent_far_ahead_unless_several_are_one_launch(monkeypatch, steps_per_launch, expected):
    found, _ = measured(monkeypatch, {(1, None): 0.004}, steps_per_launch=steps_per_launch)
    assert found.run_ahead == expected
