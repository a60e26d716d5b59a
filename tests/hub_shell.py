"""Runs commands of cpmrt as processes of their own, against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from hub_server import HubServer

ROOT = Path(__file__).parents[1]


class Shell:
    """Runs cpmrt with a home folder of its own, against a hub."""

    def __init__(self, hub: HubServer, home: Path):
        self.home, self._hub = home, hub

    def start(self, *line: str, **options: object) -> subprocess.Popen[str]:
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "HF_ENDPOINT": self._hub.url,
            "MODELSCOPE_ENDPOINT": self._hub.url, "CUDA_VISIBLE_DEVICES": "", **dict(options.pop("env", {})),
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "cpmrt", *line], cwd=ROOT, env=environment, text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )  # fmt: skip

    def __call__(self, *line: str, **options: object) -> SimpleNamespace:
        process = self.start(*line, **options)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err, err
        return SimpleNamespace(code=process.returncode, out=out, err=err)

    def refused(self, *line: str, **options: object) -> str:
        """Return the last line of what a command says that must fail."""
        done = self(*line, **options)
        assert done.code == 1 and done.out == "", done
        error = done.err.splitlines()[-1]
        assert error.startswith("cpmrt: error: ")
        return error
