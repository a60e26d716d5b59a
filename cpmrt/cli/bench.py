"""Measure how fast a model runs here, and what it costs: prefill and decode speed, bandwidth, host time, energy.

MODEL is a folder or a hub id; --shape is a well-known shape with random weights instead. The memory's read bandwidth
is measured first; the device is watched meanwhile, as far as it tells of itself.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cpmrt.bench import views
from cpmrt.bench.measure import Case
from cpmrt.bench.repeatability import TEMPERATURES, ask_again
from cpmrt.bench.run import run_benchmark
from cpmrt.bench.shapes import SHAPES, shape_config, shape_folder
from cpmrt.bench.views import check_can_plot, plot
from cpmrt.cli import arguments as options
from cpmrt.cli import option_values
from cpmrt.cli.output import note, printable, write, write_table
from cpmrt.cli.parser import UsageError, number
from cpmrt.config import SamplingParams
from cpmrt.errors import ConfigError, CpmrtError, RequestError, reason_of
from cpmrt.llm import LLM
from cpmrt.weights.hub import BUNDLED

_PREFILL_CHUNK = 2048
_REPEATS = 3
_CONTEXT_NEW = 64
_NUM_PROMPTS, _TOGETHER = 200, 8
_POSITIVE = option_values.integer(1, 2**31 - 1)


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model_source(parser, positional=True)
    parser.add_argument("--shape", choices=SHAPES, help="random weights in this shape, instead of MODEL")
    options.add_options(parser, *options.WEIGHT_BITS)
    parser.add_argument(
        "--case", dest="cases", action="append", type=_case, metavar="P:N[:S]",
        help="S sequences of P prompt and N new tokens; may be repeated (default: 1024:128)",
    )  # fmt: skip
    parser.add_argument(
        "--context", dest="cases", action="append", type=_context, metavar="TOKENS",
        help=f"a case that fills a context of so many tokens, such as 1024 or 32K, its last {_CONTEXT_NEW} new ones",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=_POSITIVE, default=_REPEATS, metavar="N", help="of each case (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T",
        help="sample, so that no text repeats itself by chance (default: 0, greedy)",
    )  # fmt: skip
    parser.add_argument(
        "--repeatability", type=_POSITIVE, nargs="?", const=_NUM_PROMPTS, metavar="N",
        help="instead of times: ask N prompts again, alone and together, and count answers that differ "
        "(default: %(const)s)",
    )  # fmt: skip
    parser.add_argument("--startup", action="store_true", help="also time a fresh process to its first token")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw power, clock and load over time as a PNG")
    options.add_engine_options(parser, *options.MODEL_FIELDS, "prefill_chunk")
    parser.set_defaults(prefill_chunk=_PREFILL_CHUNK)
    parser.add_argument(
        "--max-sequences", type=_POSITIVE, metavar="N", help="slots for sequences (default: what the cases need)"
    )
    parser.add_argument("--no-graphs", action="store_true", help="launch kernel by kernel")
    parser.add_argument("--no-pdl", action="store_true", help="no kernel starts before the one before it has ended")
    options.add_options(parser, "--hf-overrides", "--sparse")
    options.add_draft_options(parser)
    parser.add_argument(
        "--simulate-accept", type=float, metavar="TOKENS",
        help="force the tokens of a speculative step, on average: for timing with random weights",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure every case and show a table."""
    options.check_one_source(args, "bench")
    asked = "--block-type" if args.block_type else "--weight-bits" if args.weight_bits else ""
    if asked and not args.shape and args.load_format != "dummy":
        raise UsageError(f"{asked} needs random weights: --shape, or --load-format dummy")
    if args.repeatability:
        _check_no_times(args)
    changes = options.draft_changes(args)
    for path in filter(None, (args.json, args.plot)):
        _check_file(path)
    if args.plot:
        check_can_plot()
    cases = args.cases or [Case(1024, 128)]
    with ExitStack() as stack:
        settings = _settings(args, cases)
        if args.shape:
            settings |= {"model": stack.enter_context(shape_folder(args.shape, changes)), "load_format": "dummy"}
            settings["hf_overrides"] = _long_enough(args.shape, cases) | (settings["hf_overrides"] or {})
        if args.repeatability:
            settings["max_sequences"] = args.max_sequences or _TOGETHER
            return _repeatability(settings, args.repeatability)
        report = run_benchmark(
            args.shape or args.model or str(BUNDLED), settings, cases, repeats=args.repeats,
            temperature=args.temperature, times_startup=args.startup,
            listener=lambda case: note(views.line(case)),
        )  # fmt: skip
    write(printable_lines(views.summary(report)))
    write_table(views.rows(report), views.header())
    if args.json:
        _write_file(args.json, json.dumps(report.record(), indent=1))
    if args.plot:
        plot(report, args.plot)
    return 0


def _check_no_times(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that only timed runs use; --repeatability measures no times."""
    given = {
        "--json": args.json, "--plot": args.plot, "--startup": args.startup, "--case and --context": args.cases,
        "--temperature": args.temperature, "--repeats": args.repeats != _REPEATS,
    }  # fmt: skip
    for option, value in given.items():
        if value:
            raise UsageError(f"--repeatability measures no times: leave {option} out")


def _repeatability(settings: dict[str, Any], num_prompts: int) -> int:
    """Ask the same prompts again, alone and together, and show how many answers differ. Return 1 if any does."""
    with LLM(**settings) as llm:
        counts = [ask_again(llm, num_prompts, temperature) for temperature in TEMPERATURES]
    rows = [
        (f"{count.temperature:g}", f"{count.again} of {num_prompts}", f"{count.together} of {num_prompts}")
        for count in counts
    ]
    write_table(rows, ("temperature", "differ when asked again", f"differ {settings['max_sequences']} at a time"))
    return int(any(count.again or count.together for count in counts))


def printable_lines(text: str) -> str:
    """Make every line of a text safe for a terminal."""
    return "".join(f"{printable(line)}\n" for line in text.splitlines())


def _settings(args: argparse.Namespace, cases: list[Case]) -> dict[str, Any]:
    settings = options.llm_arguments(args) | {"hf_overrides": options.overrides_with_weight_bits(args)}
    if args.simulate_accept is not None:
        if settings["speculate"] == "off":
            raise ConfigError("--simulate-accept needs speculation", fix="name a draft")
        # Not adaptive: accept lengths that are forced say nothing about which tree shape pays off.
        wishes = {} if settings["speculate"] == "auto" else settings["speculate"]
        settings["speculate"] = wishes | {"adaptive": False, "simulate_accept": args.simulate_accept}
    needed = max(case.sequences for case in cases)
    if args.max_sequences is not None and args.max_sequences < needed:
        raise UsageError(f"--max-sequences {args.max_sequences}: a case has {needed} sequences")
    return settings | {
        "max_sequences": args.max_sequences or needed,
        "cuda_graphs": not args.no_graphs,
        "dependent_launch": not args.no_pdl,
    }


def _long_enough(shape: str, cases: list[Case]) -> dict[str, int]:
    """Return the config.json key that raises a shape's position limit to what the longest case needs.

    Random weights work equally well at any position.
    """
    longest = max(case.prompt_tokens + case.new_tokens for case in cases)
    return {"max_position_embeddings": max(longest, shape_config(shape)["max_position_embeddings"])}


def _context(text: str) -> Case:
    tokens = option_values.token_count(text)
    if not 2 * _CONTEXT_NEW <= tokens <= 2**24:
        what = f"expected {2 * _CONTEXT_NEW} tokens or more, such as 1024 or 32K, got {text!r}"
        raise argparse.ArgumentTypeError(what)
    return Case(tokens - _CONTEXT_NEW, _CONTEXT_NEW)


def _case(text: str) -> Case:
    numbers = text.split(":")
    if len(numbers) not in (2, 3) or not all(number.isascii() and number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"expected PROMPT:NEW or PROMPT:NEW:SEQUENCES, got {text!r}")
    return Case(*map(_POSITIVE, numbers))


def _temperature(text: str) -> float:
    temperature = number(float, "a number")(text)
    try:
        return SamplingParams(temperature=temperature).with_defaults().temperature
    except RequestError as error:
        raise argparse.ArgumentTypeError(f"expected {error.expected}, got {error.actual}") from error


def _check_file(path: Path) -> None:
    """Raise CpmrtError, before anything is measured, if the file cannot be written afterwards."""
    if not path.parent.is_dir() or path.is_dir():
        raise CpmrtError(f"{path} cannot be written", expected="a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CpmrtError(f"{path} cannot be written: Permission denied", fix="name a file where you may write")


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CpmrtError(f"{path} cannot be written: {reason_of(error)}") from error
