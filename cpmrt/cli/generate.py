"""Continue a prompt: the new text goes to standard output as it comes, a closing summary to standard error.

The text ends with a newline, added where the model made none; --json has it exactly.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from cpmrt import LLM
from cpmrt.cli import arguments as options
from cpmrt.cli.listeners import PrefillProgress, step_log, tell
from cpmrt.cli.output import cost_lines, note, summary, write, write_json
from cpmrt.cli.parser import UsageError
from cpmrt.cli.prompt_source import add_prompt_options, read_prompt
from cpmrt.config import EngineConfig, SamplingParams
from cpmrt.generation import Completion
from cpmrt.weights.hub import BUNDLED


def configure(parser: argparse.ArgumentParser) -> None:
    add_prompt_options(parser)
    options.add_model_options(parser)
    options.add_sampling_options(parser)
    options.add_logprobs_option(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object when all is done, and nothing else")
    parser.add_argument("--stats", action="store_true", help="a closing summary with the accept lengths of the draft")
    parser.add_argument(
        "--log-steps", metavar="FILE",
        help="write every step of the engine and its result as JSON lines; tools/replay_steps.py of a checkout runs "
        "them on any executor and compares",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    if params.logprobs and not args.json:
        raise UsageError("--logprobs needs --json; see cpmrt generate --help")
    prompt = read_prompt(args)
    with ExitStack() as stack:
        progress = PrefillProgress()
        stack.callback(progress.stop)
        log = (stack.enter_context(step_log(args.log_steps)),) if args.log_steps is not None else ()
        llm = stack.enter_context(LLM(**options.llm_arguments(args), on_step=tell(progress, *log)))
        completion = _generate(llm, prompt, params, progress, is_silent=args.json)
    if args.json:
        write_json(_record(args.model or str(BUNDLED), completion))
    elif args.stats:
        note("\n".join(cost_lines(completion)))
    else:
        note(summary(completion))
    return 0


def _generate(
    llm: LLM, prompt: str | list[int], params: SamplingParams, progress: PrefillProgress, *, is_silent: bool
) -> Completion:
    ids = llm.tokenizer.encode(prompt) if llm.tokenizer and isinstance(prompt, str) else prompt
    with llm.stream(ids, params) as stream:
        # A prompt that is prefilled in one step has no progress to show.
        if sys.stderr.isatty() and len(ids) > EngineConfig.prefill_chunk:
            progress.start(len(ids))
        for piece in stream:
            if not is_silent:
                write(piece.text)
    if not is_silent and not stream.completion.text.endswith("\n"):
        write("\n")
    return stream.completion


def _record(model: str, completion: Completion) -> dict[str, Any]:
    rates = {name: getattr(completion.stats, name) for name in ("prefill_tokens_per_s", "decode_tokens_per_s")}
    return {"model": model, **asdict(completion), "stats": asdict(completion.stats) | rates}
