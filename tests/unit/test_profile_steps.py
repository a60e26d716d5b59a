"""Time of each kernel by itself, from a trace in which kernels overlap."""

from __future__ import annotations

import pytest
from tool_module import tool_module

profile_steps = tool_module("profile_steps")
Launch = profile_steps.Launch


def step(at: float) -> list:
    """Return a step's launches: `inner` overlaps `begin` and ends 6 us later, `hidden` runs within `inner`, `end`
    after a gap."""
    return [
        Launch("begin", (1, 1, 1), at, 4.0),
        Launch("inner", (8, 1, 1), at + 1, 9.0),
        Launch("hidden", (2, 1, 1), at + 2, 3.0),
        Launch("end", (1, 1, 1), at + 11, 2.0),
    ]


def test_a_kernel_is_charged_for_what_it_adds():
    launches = [Launch("other", (1, 1, 1), 0.0, 5.0), *step(10.0), *step(30.0), *step(50.0)]
    num_steps, step_us, found = profile_steps.costs(launches, "begin")
    assert (num_steps, step_us) == (2, 20.0)  # the last step's end is not known
    own = {name: cost.own / cost.count for (name, _), cost in found.items()}
    assert own == pytest.approx({"begin": 4.0, "inner": 6.0, "hidden": 0.0, "end": 2.0})
    lines = profile_steps.table(num_steps, step_us, found).splitlines()
    assert lines[0] == "2 steps of 20.0 us"
    assert [line.split()[4] for line in lines[2:]] == ["inner", "begin", "end", "hidden"]
    assert lines[2].split() == ["1.0", "6.00", "9.00", "6.0", "inner", "(8,", "1,", "1)"]


def test_the_last_steps_count():
    early = [launch._replace(duration=100.0) for launch in step(0.0)]
    launches = early + [launch for number in range(1, 40) for launch in step(1000.0 * number)]
    num_steps, _, found = profile_steps.costs(launches, "begin")
    assert num_steps == 20
    assert all(cost.count == num_steps for cost in found.values())
    assert found["begin", (1, 1, 1)].own == pytest.approx(80.0)


def test_one_step_is_none():
    assert profile_steps.costs(step(0.0), "begin")[0] == 0
    assert profile_steps.main([]) == 2
