"""tools/gpu_test_kernels.py: it finds the kernels that GPU tests need, and compiles them. No GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_builds import constant_sets

from cpmrt.cuda.build import nvrtc

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    """Run the tool and return its output."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_test_kernels.py"), "--workers", "1", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(nvrtc.version() is None, reason="no NVRTC: pip install 'cpmrt[dev]'")
def test_kernels_of_a_kernels_tests_are_compiled_in_the_name_of_another_compiler(tmp_path: Path) -> None:
    said = run("--folder", str(tmp_path), "--compiler", "13.0.1", "tests/kernels/test_residual.py")
    names = [path.name for path in (tmp_path / "cubins").iterdir()]
    assert len(names) >= 2 * len(constant_sets("rows/residual.cu")) and all(".13.0.1." in name for name in names)
    assert said.startswith(f"{len(names)} modules of 1 sources")


def test_modules_of_models_are_found_too() -> None:
    number, _, _, sources, _ = run("tests/executors/test_cuda_pauses.py").split()
    assert int(number) > 20 and int(sources) > 10
