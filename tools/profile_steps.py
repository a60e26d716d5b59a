"""Where the time of a step goes, kernel by kernel: `cpmrt bench` under CUPTI, by way of torch's profiler.

    python3 tools/profile_steps.py step_begin --shape minicpm4-8b --weight-bits 4 --case 1024:40 --repeats 1

The first argument is the kernel that a step begins with (`step_begin`, `prefill_begin`, `speculate_begin`), the rest
goes to the benchmark. Needs a torch with CUDA. Launches overlap (a kernel starts before the one before it has ended),
so a kernel's own time is by how much it moves the end of the step: from the latest end before it to its own. The first
kernel of a graph may wait for the tracing itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_LAST_STEPS = 20


class Launch(NamedTuple):
    """One launch of a kernel in a trace; times are in us."""

    name: str
    grid: tuple[int, ...]
    start: float
    duration: float


@dataclass
class Cost:
    """The cost of all launches of a kernel with one grid in the measured steps, in us."""

    count: int = 0
    own: float = 0.0
    durations: list[float] = field(default_factory=list)


def costs(launches: Sequence[Launch], first_kernel: str) -> tuple[int, float, dict[tuple[str, tuple[int, ...]], Cost]]:
    """Return the number of measured steps, the median of a step in us, and costs by kernel and grid.

    `launches` are sorted by start. The last steps of the trace are measured, without the very last one, whose end is
    not known.
    """
    begins = [index for index, launch in enumerate(launches) if first_kernel in launch.name][-_LAST_STEPS - 1 :]
    found: dict[tuple[str, tuple[int, ...]], Cost] = defaultdict(Cost)
    if len(begins) < 2:
        return 0, 0.0, found
    latest = max((launch.start + launch.duration for launch in launches[: begins[0]]), default=0.0)
    for launch in launches[begins[0] : begins[-1]]:
        cost, end = found[launch.name, launch.grid], launch.start + launch.duration
        cost.count += 1
        cost.own += max(0.0, end - max(launch.start, latest))
        cost.durations.append(launch.duration)
        latest = max(latest, end)
    steps = [launches[end].start - launches[begin].start for begin, end in zip(begins, begins[1:], strict=False)]
    return len(steps), median(steps), found


def table(num_steps: int, step_us: float, found: dict[tuple[str, tuple[int, ...]], Cost]) -> str:
    """Return a line for each kernel and grid, the costliest first."""
    lines = [f"{num_steps} steps of {step_us:.1f} us", "  a step   own us  from start to end  us a step  kernel, grid"]
    for (name, grid), cost in sorted(found.items(), key=lambda item: -item[1].own):
        lines.append(
            f"{cost.count / num_steps:8.1f} {cost.own / cost.count:8.2f} {median(cost.durations):18.2f}"
            f" {cost.own / num_steps:10.1f}  {name} {grid}"
        )
    return "\n".join(lines)


def traced(arguments: Sequence[str]) -> list[Launch]:
    """Run `cpmrt bench` with these arguments and return its kernels."""
    from needed_packages import needing

    with needing("torch"):
        import torch
        from torch.profiler import ProfilerActivity, profile

    from cpmrt.cli.main import main as cpmrt

    torch.zeros(1, device="cuda")  # creates the CUDA context that CUPTI traces
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        if status := cpmrt(["bench", *arguments]):
            sys.exit(status)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    kernels = (event for event in events if event.get("cat") == "kernel")
    launches = [Launch(event["name"], tuple(event["args"]["grid"]), event["ts"], event["dur"]) for event in kernels]
    return sorted(launches, key=lambda launch: launch.start)


def main(arguments: Sequence[str]) -> int:
    """Trace the benchmark and print the table. Return the exit code."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    launches = traced(arguments[1:])
    num_steps, step_us, found = costs(launches, arguments[0])
    if not num_steps:
        print(f"no two steps begin with a kernel {arguments[0]!r} in {len(launches)} launches", file=sys.stderr)
        return 1
    print(table(num_steps, step_us, found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
