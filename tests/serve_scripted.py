"""A server process whose model costs next to nothing, to measure serving: `serve_scripted.py FOLDER [STEP_S]`.

Writes its URL, then for each line on standard input the CPU seconds and the peak memory (KiB) it has used so far.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from serving import saying_llm, serving

from cpmrt.executor import ExecutorLimits
from cpmrt.server.run import prepare_process


def main() -> None:
    limits = ExecutorLimits(max_sequences=64, max_context=8192, prefill_chunk=512, run_ahead=2)
    delay_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    llm = saying_llm(Path(sys.argv[1]), lambda prompt: "the quick brown fox " * 50, limits=limits, delay_s=delay_s)
    prepare_process()
    with serving(lambda: llm, model_name="scripted") as server:
        print(server.url, flush=True)
        for _ in sys.stdin:
            print(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)


if __name__ == "__main__":
    main()
