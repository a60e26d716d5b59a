"""Times a fresh process from its start to its first token; as a module it is that process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cpmrt
from cpmrt.errors import CpmrtError

_LIMIT_S = 600
_PROMPT = (1, 2, 3)


def seconds_to_first_token(llm_arguments: Mapping[str, Any]) -> float:
    """Start Python, make the `LLM`, generate one token. Raises CpmrtError with what the process said if it fails."""
    arguments = dict(llm_arguments)
    if arguments.get("model") is not None and Path(arguments["model"]).is_dir():
        arguments["model"] = str(Path(arguments["model"]).resolve())
    command = [sys.executable, "-m", __name__, json.dumps(arguments)]
    started = time.time()
    try:
        # In the folder that holds the package: `-m` finds it there, installed or not.
        folder = Path(cpmrt.__file__).parent.parent
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CpmrtError("a fresh process gave no token", actual=f"nothing in {_LIMIT_S} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CpmrtError("a fresh process gave no token", actual=said[-1])
    return float(done.stdout.split()[-1]) - started


def _first_token_at(llm_arguments: Mapping[str, Any]) -> float:
    from cpmrt import LLM, SamplingParams

    with LLM(**llm_arguments) as llm:
        llm.generate(_PROMPT, SamplingParams(max_new_tokens=1, ignore_eos=True))
        return time.time()


if __name__ == "__main__":
    sys.stdout.write(f"{_first_token_at(json.loads(sys.argv[1]))}\n")
