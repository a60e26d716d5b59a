"""tools/gpu_tests.py on a folder of small tests: the jobs it runs side by side, and complete results. No GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tool_module import tool_module

ROOT = Path(__file__).resolve().parents[2]
gpu_tests = tool_module("gpu_tests")
TIMED = """
import pathlib
import time

import pytest

pytestmark = pytest.mark.gpu


def log(what):
    with open("log", "a") as file:
        file.write(what + "\\n")


@pytest.mark.parametrize("number", range(20))
def test_beside_others(number):
    log("begin")
    time.sleep(0.01)
    log("end")


@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    log("alone")


def test_threads():
    import os
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


@pytest.mark.all
def test_of_the_second_tier():
    log("all")
"""
SHORT = """
import pytest


@pytest.mark.gpu
def test_is_short():
    pass
"""
MIXED = """
import os

import pytest

pytestmark = pytest.mark.gpu


def test_passes():
    pass


def test_fails():
    assert 1 == 2, "the reason"


def test_skips():
    pytest.skip("not here")


@pytest.mark.alone
def test_ends_the_process():
    os._exit(9)
"""


def run(folder: Path, marked: str, *options: str, **tests: str) -> tuple[int, list[str]]:
    """Run the tool on files with these tests and return its exit code and output lines."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: .\n  all: .\n  alone: .\n")
    for name, text in tests.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, str(ROOT / "tools" / "gpu_tests.py"), "--workers", "2", "-m", marked, *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [*command, *(f"{name}.py" for name in tests)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_tests_run_side_by_side_and_those_marked_alone_after_them(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "gpu and not all", test_timed=TIMED)
    assert code == 0 and len(lines) == 1 and lines[0].startswith("24 passed in ")
    log = (tmp_path / "log").read_text().split()
    assert log[-3:] == ["alone"] * 3 and log.count("begin") == log.count("end") == 20 and "all" not in log


def test_every_test_is_counted_and_what_fails_is_shown(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "gpu", test_mixed=MIXED)
    assert code == 1
    assert lines[-1].startswith("1 errors, 1 failed, 1 passed, 1 skipped in ")
    assert any("the reason" in line for line in lines)
    assert "==================== 1 tests from test_mixed.py::test_ends_the_process on, exit code 9" in lines


def test_what_time_does_not_suffice_for_is_counted(tmp_path: Path) -> None:
    """When time runs out, finished tests of a killed job count, in the order of the files, and the others are named."""
    sleeping = "def test_sleeps():\n    import time\n    time.sleep(300)\n\n\ndef test_skips():"
    slow = MIXED.replace("def test_skips():", sleeping)
    code, lines = run(tmp_path, "gpu", "--seconds", "8", test_first=SHORT, test_mixed=slow, test_last=SHORT)
    assert code == 1 and lines[-1].startswith("1 failed, 1 not begun, 3 passed, 2 unfinished in ")
    assert any("test_mixed.py::test_fails FAILED" in line for line in lines)
    assert [line for line in lines if line.startswith(("unfinished: ", "not begun: "))] == [
        "unfinished: test_mixed.py::test_sleeps",
        "unfinished: test_mixed.py::test_skips",
        "not begun: test_mixed.py::test_ends_the_process",
    ]


@pytest.mark.parametrize("code", [1, 2, 4])
def test_tests_that_cannot_be_collected_end_it(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, code, "the reason")

    monkeypatch.setattr(gpu_tests, "call_pytest", said)
    with pytest.raises(SystemExit, match="the reason"):
        gpu_tests.collect("gpu", [])


def test_no_tests_at_all_are_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_tests, "run_all", lambda *arguments: Counter())
    assert gpu_tests.main([]) == 1
    assert capsys.readouterr().out.startswith("no tests ran in ")
