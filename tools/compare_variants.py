"""`cpmrt bench` of several trees, or of one with other constants, in turn on one machine: what a change is worth.

    tools/compare_variants.py before=/tmp/before after=. -- --shape minicpm4-8b --weight-bits 4 --case 1024:192
    tools/compare_variants.py base=. "six=.,cpmrt.cuda.ops.linear_packed.division:_STAGES=6" -- --shape minicpm4-8b

A variant is LABEL=FOLDER, then ,MODULE:NAME=VALUE for each constant that it has otherwise: a Python literal, which is
set before anything runs. A module that took the constant's value when it was imported keeps the old one. Each run is a
process of its own, in the variant's folder: relative paths among the options of `bench` count from there. All
variants run once for nothing, so that their kernels are compiled, and then in turn: machines and hours differ by more
than many changes do.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

_BEFORE_SETTING = re.compile(r",(?=[A-Za-z_][\w.]*:)")
"""A comma followed by MODULE:NAME=VALUE; other commas belong to a value."""
_RUN = """
import ast, importlib, sys
for place, value in ast.literal_eval(sys.argv[1]):
    module, _, name = place.partition(":")
    module = importlib.import_module(module)
    getattr(module, name)
    setattr(module, name, value)
from cpmrt.cli.main import main
sys.exit(main(["bench", *sys.argv[2:]]))
"""


@dataclass(frozen=True)
class Variant:
    """A source tree to measure, and the constants to change in it as (MODULE:NAME, value)."""

    label: str
    folder: Path
    constants: tuple[tuple[str, Any], ...] = ()


def parse_variant(text: str) -> Variant:
    """Parse LABEL=FOLDER,MODULE:NAME=VALUE,... Raises ArgumentTypeError."""
    label, equals, rest = text.partition("=")
    folder, *settings = _BEFORE_SETTING.split(rest)
    if not label or not equals or not (Path(folder) / "cpmrt").is_dir():
        raise argparse.ArgumentTypeError(f"expected LABEL=FOLDER with cpmrt in the folder, got {text!r}")
    constants = []
    for setting in settings:
        place, _, value = setting.partition("=")
        if not all(place.partition(":")):
            raise argparse.ArgumentTypeError(f"expected MODULE:NAME=VALUE, got {setting!r}")
        try:
            constants.append((place, ast.literal_eval(value)))
        except (ValueError, SyntaxError):
            raise argparse.ArgumentTypeError(f"{place}: expected a Python literal, got {value!r}") from None
    return Variant(label, Path(folder).resolve(), tuple(constants))


def bench(variant: Variant, arguments: Sequence[str]) -> Mapping[str, float]:
    """Return the speed of each case in tokens a second. Raises SystemExit if the benchmark fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        python_path = os.pathsep.join(filter(None, (str(variant.folder), os.environ.get("PYTHONPATH"))))
        run = (sys.executable, "-c", _RUN, repr(variant.constants), "--json", str(path), "-q", *arguments)
        environment = {**os.environ, "PYTHONPATH": python_path}
        done = subprocess.run(run, cwd=variant.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{variant.label}: cpmrt bench ended with {done.returncode}\n{done.stderr.strip()}")
        return speeds_of(json.loads(path.read_text(encoding="utf-8")))


def speeds_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the decode speed of each case, in tokens a second, from the benchmark's JSON."""
    measured = [case["measurement"] for case in record["cases"]]
    names = ("prompt_tokens", "new_tokens", "sequences")
    return {":".join(str(one["case"][name]) for name in names): one["decode_tokens_per_s"] for one in measured}


def table(labels: Sequence[str], rounds: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Return a line per case and variant: the median, its distance from the first variant's, and each round's speed."""
    lines = []
    for case in rounds[0][0]:
        speeds = [[of_round[place][case] for of_round in rounds] for place in range(len(labels))]
        first = median(speeds[0])
        for label, own in zip(labels, speeds, strict=True):
            runs = " ".join(f"{speed:,.1f}" for speed in own)
            lines.append(f"{case:>14} {label:16} {median(own):10,.1f} {median(own) / first - 1:+7.2%}   {runs}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Parse the options, run the benchmarks and print the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=parse_variant, metavar="LABEL=FOLDER[,MODULE:NAME=VALUE]...")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="runs of each (default: %(default)s)")
    words = list(arguments)
    own = words.index("--") if "--" in words else len(words)
    options, of_bench = parser.parse_args(words[:own]), words[own + 1 :]
    if options.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {options.rounds}")
    _, *rounds = [[bench(variant, of_bench) for variant in options.variants] for _ in range(options.rounds + 1)]
    print(table([variant.label for variant in options.variants], rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
