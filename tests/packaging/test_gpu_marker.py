"""The `gpu` marker of conftest.py: a missing GPU is a visible skip, and a failure where a GPU is required."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = """\
import pytest


@pytest.mark.gpu
def test_on_gpu():
    pass


def test_anywhere():
    pass


def test_skipped_for_another_reason():
    pytest.skip("no matter")
"""


@pytest.mark.parametrize(
    ("require", "code", "closing", "line"),
    [
        ("", 0, "1 passed, 2 skipped", "needs a GPU: "),
        ("1", 1, "1 passed, 1 skipped, 1 error", "skipped under CPMRT_REQUIRE_GPU=1: Skipped: needs a GPU: "),
    ],
)
def test_gpu_test_without_gpu(tmp_path: Path, require: str, code: int, closing: str, line: str) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_sample.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra --strict-markers\nmarkers = gpu: needs one\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "CPMRT_REQUIRE_GPU": require, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert closing in done.stdout and line in done.stdout
