"""A run of the tests leaves nothing in the folder for temporary files but what pytest itself keeps there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_removes_its_temporary_folders(tmp_path):
    path = tmp_path / "temporary"
    path.mkdir()
    chosen = ["tests/unit/test_special_text.py", "-k", "forges and unigram", "-n", "1"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(path)}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert [found.name for found in path.iterdir() if not found.name.startswith("pytest-of-")] == []
