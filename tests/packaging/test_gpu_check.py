"""tools/gpu_check.py: its stages, its reading of the logs, and the time limit of each stage. No GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tool_module import tool_module

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"


@pytest.fixture(scope="module")
def check():
    """tools/gpu_check.py as a module."""
    yield tool_module("gpu_check")
    del sys.modules["gpu_check"]


def code_stage(check, code, limit_s=30, judge=None):
    judge = judge or (lambda log: check.Verdict(True, "n"))
    return check.Stage("a stage", (sys.executable, "-c", code), limit_s, judge)


@pytest.mark.parametrize(("log", "is_good", "numbers"), [
    ("....\n120 passed in 3.21s\n", True, "120 passed"),
    ("120 passed, 30 deselected in 61.02s (0:01:01)\n", True, "120 passed, 30 deselected"),
    ("===== 3 passed, 1 warning in 0.10s =====\n", True, "3 passed, 1 warning"),
    ("2 failed, 118 passed, 1 error in 3.2s\n", False, "2 failed, 118 passed, 1 error"),
    ("118 passed, 1 skipped in 3.2s\n", False, "118 passed, 1 skipped"),
    ("118 passed, 2 errors in 3.2s\n", False, "118 passed, 2 errors"),
    ("4 passed, 1 xfailed in 3.2s\n", True, "4 passed, 1 xfailed"),
    ("30 deselected in 0.10s\n", False, "30 deselected"),
    ("no tests ran in 0.01s\n", False, "no summary"),
    ("5 passed, said a test in 3 steps\nSegmentation fault\n", False, "no summary"),
], ids=lambda value: str(value)[:24].strip())  # fmt: skip
def test_a_log_of_pytest(check, log, is_good, numbers):
    assert check.judge_pytest(log) == check.Verdict(is_good, numbers)


PASSED = "========= COMPUTE-SANITIZER\n..\n2 passed in 9.9s\n"


@pytest.mark.parametrize(("log", "is_good", "numbers"), [
    (PASSED + "========= ERROR SUMMARY: 0 errors\n", True, "0 errors; 2 passed"),
    (PASSED + "========= ERROR SUMMARY: 1 error\n", False, "1 error; 2 passed"),
    (PASSED + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True,
     "0 hazards displayed (0 errors, 0 warnings); 2 passed"),
    (PASSED + "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", False,
     "3 hazards displayed (1 error, 2 warnings); 2 passed"),
    (PASSED, False, "no summary of the sanitizer; 2 passed"),
    ("1 failed in 9.9s\n========= ERROR SUMMARY: 0 errors\n", False, "0 errors; 1 failed"),
])  # fmt: skip
def test_a_log_of_the_sanitizer(check, log, is_good, numbers):
    assert check.judge_sanitizer(log) == check.Verdict(is_good, numbers)


def test_the_numbers_of_the_benchmark_are_those_of_its_json(check, tmp_path):
    path = tmp_path / "bench.json"
    judge = check.judge_bench(path)
    assert not judge("").is_good
    command = ("bench", "--executor", "reference", "--case", "8:3", "--repeats", "1", "--max-context", "64")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "cpmrt", *command, "--json", str(path)], check=True, env=environment,
                   capture_output=True)  # fmt: skip
    verdict = judge("")
    assert verdict.is_good and verdict.numbers.startswith("8:3:1 prefill ")
    record = json.loads(path.read_text())
    record["cases"][0]["read_share"], record["process_to_first_token_s"] = 0.914, 1.5
    path.write_text(json.dumps(record))
    assert "tok/s (91% of read), host " in judge("").numbers and judge("").numbers.endswith("after 1.50 s")
    path.write_text("{}")
    assert not judge("").is_good


def names(found):
    return [stage.name for stage in found]


def test_the_whole_check(check, tmp_path):
    found = check.stages(tmp_path, quick=False, gpu_bytes=140 << 30, sanitizer=SANITIZER)
    assert names(found) == [
        "GPU tests", "path of older GPUs", "memcheck", "racecheck", "initcheck", "planted faults", "benchmark 0.5B",
        "benchmark 8B", "benchmark 8B, 8 together",
    ]  # fmt: skip
    assert all(stage.command and stage.limit_s > 0 for stage in found)
    assert [stage.command[0] for stage in found[2:5]] == [SANITIZER] * 3 and found[5].command[-1] == SANITIZER
    assert found[1].command[:2] == ("env", "CPMRT_PORTABLE=1")
    assert found[0].command[1:4] == ("tools/gpu_tests.py", "-m", "gpu")
    assert "tests/kernels/test_linear.py" in found[0].command and "tools/gpu_tests.py" in found[1].command


def test_the_quick_check_leaves_out_the_second_tier_and_the_large_shape(check, tmp_path):
    found = check.stages(tmp_path, quick=True, gpu_bytes=140 << 30, sanitizer=SANITIZER)
    assert names(found)[-1] == "benchmark 0.5B" and "gpu and not all" in found[0].command


def test_what_cannot_run_is_said_and_is_no_failure(check, tmp_path, capsys):
    found = check.stages(tmp_path, quick=False, gpu_bytes=8 << 30, sanitizer=None)
    notes = {stage.name: stage.note for stage in found if not stage.command}
    sanitized = ("memcheck", "racecheck", "initcheck", "planted faults")
    assert notes == dict.fromkeys(sanitized, "compute-sanitizer is not installed") | {
        "benchmark 8B": "needs a GPU with 22 GiB"
    }
    assert check.run_stages([stage for stage in found if not stage.command], tmp_path) == 0
    assert "memcheck        NOT RUN  0.0      compute-sanitizer is not installed" in capsys.readouterr().out


def test_every_sanitized_test_is_a_gpu_test_that_exists(check):
    for file, tests in check.SANITIZED.items():
        text = (ROOT / "tests" / "kernels" / file).read_text()
        assert "mark.gpu" in text, file
        for test in tests:
            assert f"\ndef {test}(" in text, f"{file}::{test}"


def test_every_kernel_file_is_sanitized_alone_or_in_a_model(check):
    from reference.golden_models import TINY

    from cpmrt.cuda.kernels import files

    texts = "".join(file + (ROOT / "tests" / "kernels" / file).read_text() for file in check.SANITIZED)
    assert [file for file in files() if Path(file).stem not in texts] == list(check.NOT_SANITIZED)
    assert {model.rpartition("-")[0] for model in check.SANITIZED_MODELS} <= set(TINY)
    assert all((ROOT / file).is_file() for file in check.PORTABLE_TESTS)


def test_files_of_gpu_tests_are_found(check):
    files = check.gpu_test_files()
    assert {"tests/kernels/test_linear.py", "tests/executors/test_cuda_executor.py"} <= set(files)
    assert "tests/unit/test_engine.py" not in files


def test_a_stage_runs_in_the_source_tree_and_a_skip_is_a_failure_there(check, tmp_path):
    code = "import os, cpmrt; print(os.getcwd(), cpmrt.__file__, os.environ['CPMRT_REQUIRE_GPU'])"
    outcome = check.run_stage(code_stage(check, code), tmp_path)
    assert (outcome.outcome, outcome.numbers, outcome.failed) == ("ok", "n", False)
    log = (tmp_path / "a-stage.log").read_text()
    assert log == f"{ROOT} {ROOT / 'cpmrt' / '__init__.py'} 1\n"


@pytest.mark.parametrize(("code", "judged", "outcome"), [
    ("raise SystemExit(3)", True, "FAILED (exit code 3)"),
    ("pass", False, "FAILED (exit code 0)"),
    ("import os; os.kill(os.getpid(), 9)", True, "FAILED (exit code -9)"),
])  # fmt: skip
def test_an_exit_code_or_a_bad_log_is_a_failure(check, tmp_path, code, judged, outcome):
    found = check.run_stage(code_stage(check, code, judge=lambda log: check.Verdict(judged, "")), tmp_path)
    assert found.failed and found.outcome == outcome


def test_a_stage_that_hangs_is_ended_with_its_children(check, tmp_path):
    child = "import time; time.sleep(60)"
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    begun = time.monotonic()
    outcome = check.run_stage(code_stage(check, code, limit_s=3), tmp_path)
    assert outcome.failed and outcome.outcome == "TIMED OUT (3 s)" and time.monotonic() - begun < 20
    stat = Path("/proc", (tmp_path / "a-stage.log").read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.02)


def test_every_stage_runs_and_one_failure_fails_all(check, tmp_path, capsys):
    def numbered(name, code):
        return check.Stage(name, (sys.executable, "-c", code), 30, lambda log: check.Verdict(True, f"of {name}"))

    found = [numbered("bad", "print('the reason'); raise SystemExit(1)"), numbered("good", "pass")]
    assert check.run_stages(found, tmp_path) == 1
    out = capsys.readouterr().out
    assert "    the reason\n" in out
    *_, heading, bad, good, logs = out.splitlines()
    assert heading.split() == ["stage", "outcome", "seconds", "numbers"]
    assert bad.startswith("bad    FAILED (exit code 1)") and bad.endswith("of bad") and good.startswith("good   ok")
    assert logs == f"logs: {tmp_path}"


def test_a_result_of_an_earlier_run_is_not_taken_for_this_one(check, tmp_path):
    (tmp_path / "benchmark-0.5b.json").write_text("{}")
    check.stages(tmp_path, quick=True, gpu_bytes=1, sanitizer=None)
    assert not (tmp_path / "benchmark-0.5b.json").exists()


def test_without_a_gpu_it_is_one_line(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "tools" / "dev.py"), "gpu", "--logs", str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "tools/dev.py: gpu needs an NVIDIA GPU with a working driver; see nvidia-smi\n"
    assert not (tmp_path / "logs").exists()
