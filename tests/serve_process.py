"""`cpmrt serve` in a process of its own with a model made for a test: `serve_process.py KIND FOLDER ARGUMENTS`.

KIND is "plain" (answers "ok"), "endless" (3,000 tokens), "slow" (loads for a minute) or "lost" (the device fails).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from serving import saying_llm

from cpmrt.cli import main, serve
from cpmrt.errors import DeviceError


def load(kind: str, folder: Path):
    if kind == "slow":
        time.sleep(60)

    def fail(step):
        if kind == "lost":
            raise DeviceError("the GPU is gone")

    text = "0123456789" * 300 if kind == "endless" else "ok"
    return saying_llm(folder, lambda prompt: text, fail=fail, delay_s=0.001)


if __name__ == "__main__":
    kind, folder, *arguments = sys.argv[1:]
    serve.LLM = lambda **options: load(kind, Path(folder))
    sys.exit(main.main(["serve", "--port", "0", *arguments]))
