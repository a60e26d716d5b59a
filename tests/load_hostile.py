"""Loads damaged checkpoints one after the other in this process, under a memory limit, and says how each ended.

python tests/load_hostile.py FOLDER FIRST STEP: of all damages the one numbered FIRST, and each STEP-th after it. A JSON
line each: its number, name and outcome, "loads", "refused: ..." (a CpmrtError of one line) or "fails: ...". Standard
error must be a file: what a library prints there, such as a panic, counts as a failure.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import warnings
from itertools import islice
from pathlib import Path

from hostile_files import damages, write_good

from cpmrt import LLM, SamplingParams
from cpmrt.errors import CpmrtError

ROOM = 700 << 20
"""Bytes of address space beyond what the process has after the good folder was loaded."""


def outcome_of(folder: Path) -> str:
    """Load the folder and let it write two tokens."""
    try:
        with LLM(folder, executor="reference", max_context=None) as llm:
            llm.generate("aaaaaaaaaaaaaaaaaaaaaaaaaaaa b\n", SamplingParams(max_new_tokens=2, temperature=0))
            if llm.chat_template is not None:
                llm.chat_prompt([{"role": "user", "content": "hello"}])
        return "loads"
    except CpmrtError as error:
        text = str(error)
        return f"refused: {text}" if "\n" not in text and len(text) < 1500 else f"fails: a long error: {text[:3000]!r}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error)[:300]}"


def printed_bytes() -> int:
    """Return how many bytes standard error holds by now."""
    sys.stderr.flush()
    return os.fstat(2).st_size


def limit_memory() -> None:
    """Limit this process to ROOM bytes more of address space than are mapped now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, mapped + ROOM))


def main() -> None:
    scratch, first, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    good, folder = write_good(scratch / "good"), scratch / "damaged"
    assert outcome_of(good) == "loads"
    limit_memory()
    for number, damage in islice(enumerate(damages()), first, None, step):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        damage.apply(folder)
        print(json.dumps([number, damage.name, None]), flush=True)
        before, outcome = printed_bytes(), outcome_of(folder)
        if printed_bytes() > before:
            outcome = f"fails: something is printed; {outcome}"
        print(json.dumps([number, damage.name, outcome]), flush=True)


if __name__ == "__main__":
    main()
