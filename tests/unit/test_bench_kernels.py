"""tools/bench_kernels.py without a GPU: each of its cases launches the kernel that it is to time."""

from __future__ import annotations

import importlib
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.precompile import known_device
from cpmrt.memory.arena import Arena

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module("bench_kernels")


class Paper:
    """A pretended GPU: its memory is never touched, and each run takes a microsecond per launch."""

    has_library = False

    def __init__(self, launched):
        self.device, self.stream, self._launched = known_device("sm_90"), None, launched
        self.runs = []

    def arena(self, plan):
        no_reserve = 0x4000
        memory = mmap.mmap(-1, plan.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        return Arena(plan, np.frombuffer(memory, np.uint8))

    def rings(self, max_context, vocab_size):
        return SimpleNamespace(addresses=(np.uint64(1), np.uint64(2)), command_bytes=4096)

    def put(self, array, values):
        assert isinstance(values, int) or (len(values) <= len(array) and values[0].shape == array[0].shape)

    def randomise(self, launcher, arena, specs):
        assert all(any(region.name.startswith(spec.name) for region in arena.plan.regions) for spec in specs)

    def microseconds(self, enqueue):
        self._launched.clear()
        enqueue()
        assert len(set(self._launched)) == 1, "only one kernel is timed at once"
        self.runs.append(self._launched[0])
        return float(len(self._launched))


@pytest.mark.parametrize("shape", ["minicpm4-8b", "minicpm4-0.5b"])
def test_every_case_of_the_table_is_launched(tool, monkeypatch, shape):
    launched = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, spec, *args, **options: launched.append(spec.name))
    monkeypatch.setattr(Launcher, "is_recording", True)
    gpu = Paper(launched)
    lines = list(tool.lines_of(gpu, shape, {"byte": 1e12, "FLOP": 1e12}, "", (1, 8, 64)))
    assert all(line.us == 1.0 for line in lines)
    readme = (ROOT / "kernels_cu" / "README.md").read_text()
    table = readme[readme.index("| kernel | case |") : readme.index("<!-- end of measured")]
    head, _, *rows = ([cell.strip() for cell in row.split("|")] for row in table.splitlines() if row.startswith("|"))
    measured = {(row[1], row[2]) for row in rows if row[head.index(shape)]}
    missing = measured - {(line.kernel, line.case) for line in lines}
    assert not missing, "in the README, but not measured"
    # Where cuBLASLt is absent, the project's own product stands in for it.
    named = {line.kernel.partition(" ")[0].replace("cuBLASLt", "gemm") for line in lines}
    assert named == set(gpu.runs) >= {f"linear_packed_{name}" for name in ("qkv", "residual", "gate_up")}
