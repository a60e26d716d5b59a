"""Damaged and hostile checkpoints either load or end in one line that names what is wrong; nothing aborts or hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_files import damages

TESTS = Path(__file__).resolve().parent.parent
SECONDS = 300


def load_all(folder, first, step):
    """Load the damages FIRST, FIRST + STEP, ...; return what failed and how many loaded.

    A damage that ends the process has failed, and another process goes on behind it.
    """
    total, faults, loaded, errors = sum(1 for _ in damages()), [], 0, folder / "stderr"
    environment = {
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # else malloc reserves 64 MiB of addresses for each thread, which counts
    }  # fmt: skip
    while first < total:
        command = [sys.executable, str(TESTS / "load_hostile.py"), str(folder), str(first), str(step)]
        with errors.open("w") as stderr:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=SECONDS, env=environment
            )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, errors.read_text()
        outcomes = [(name, outcome) for _, name, outcome in lines if outcome]
        faults += [(name, outcome) for name, outcome in outcomes if outcome.startswith("fails")]
        loaded += sum(outcome == "loads" for _, outcome in outcomes)
        if done.returncode == 0:
            break
        faults.append((lines[-1][1], f"exit code {done.returncode}: {errors.read_text()[-300:]}"))
        first = lines[-1][0] + step
    return faults, loaded


def test_some_damaged_checkpoints(tmp_path):
    step = 7
    faults, loaded = load_all(tmp_path, 0, step)
    assert not faults, "\n".join(f"{name}: {fault}" for name, fault in faults)
    assert loaded > 20, "changes that do no harm are among them"


@pytest.mark.all
@pytest.mark.parametrize("first", range(1, 7))
def test_all_other_damaged_checkpoints(tmp_path, first):
    faults, _ = load_all(tmp_path, first, 7)
    assert not faults, "\n".join(f"{name}: {fault}" for name, fault in faults)
