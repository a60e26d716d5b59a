"""Replays the steps of a logged run on an executor, and says whether its results are those of the log.

    cpmrt generate "def load_config(path):" --executor reference --log-steps run.jsonl
    tools/replay_steps.py run.jsonl --executor cuda

The model and its settings are named by the same options as for `cpmrt generate`, and but for the executor must be those
of the run. Compared are the tokens of every step, and what ended a sequence; of log-probabilities the largest
difference is shown. Two executors round differently: where two tokens are nearly as likely their choices may part.
The exit code is 0 where all results agree, 1 from the first step on that has another, 2 for what cannot be replayed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cpmrt.cli.arguments import add_model_options, llm_arguments  # noqa: E402
from cpmrt.cli.parser import Parser, UsageError  # noqa: E402
from cpmrt.engine.step_log import read_steps, replay  # noqa: E402
from cpmrt.errors import ConfigError, CpmrtError, reason_of  # noqa: E402
from cpmrt.executor import Executor, SlotResult, Step, StepResult  # noqa: E402
from cpmrt.llm import LLM  # noqa: E402

Records = list[tuple[Step, StepResult]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay one log. Return the exit code."""
    try:
        options = _options(arguments)
        records = _read(options.log)
        with LLM(**llm_arguments(options)) as llm:
            difference, furthest = compare(records, llm.executor)
    except (CpmrtError, UsageError) as error:
        print(f"replay_steps.py: error: {error}", file=sys.stderr)
        return 2
    print(difference or f"all {len(records)} steps agree")
    print(f"log-probabilities differ by at most {furthest:.3g}")
    return 1 if difference else 0


def compare(records: Records, executor: Executor) -> tuple[str, float]:
    """Return a text on the first result that differs ('' if none), and the largest difference of log-probabilities."""
    furthest = 0.0
    replayed = replay((step for step, _ in records), executor)
    for number, ((step, logged), (_, result)) in enumerate(zip(records, replayed, strict=True), 1):
        for entry, (before, now) in enumerate(zip(logged.slots, result.slots, strict=True)):
            if _told(before) != _told(now):
                where = f"step {number} of {len(records)} ({type(step).__name__}), entry {entry}"
                return f"{where}: logged {_told(before)}, replayed {_told(now)}", furthest
            pairs = zip(before.logprobs, now.logprobs, strict=True)
            furthest = max([furthest, *(abs(one.logprob - other.logprob) for one, other in pairs)])
    return "", furthest


def _told(slot: SlotResult) -> str:
    ended = ["not finite"] * slot.non_finite + [f"mask: {slot.mask_failure}"] * (slot.mask_failure is not None)
    return ", ".join([f"tokens {list(slot.token_ids)}", *ended])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="replay_steps.py", description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG", help="what --log-steps wrote")
    add_model_options(parser)
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


def _read(path: Path) -> Records:
    """Return the steps of a log with their results. Raises ConfigError."""
    try:
        records = list(read_steps(path))
    except OSError as error:
        raise ConfigError(f"step log {path} cannot be read: {reason_of(error)}") from None
    if not records:
        raise ConfigError(f"step log {path}", expected="a step a line", actual="an empty file")
    return records


if __name__ == "__main__":
    sys.exit(main())
