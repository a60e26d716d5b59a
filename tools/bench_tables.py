"""Measures what the tables of docs/performance.md say of cpmrt, row after row on one machine.

    tools/bench_tables.py --out build/tables                     # all rows, ten minutes on an H200
    tools/bench_tables.py --out build/tables --only '8b|starts'  # those whose name the expression finds
    tools/bench_tables.py --out build/tables --seconds 300       # as many as begin within this time, in order

Each row is a `cpmrt bench` in a process of its own, with the options below and random weights. The folder gets the JSON
file of each row, and `tables.md` with a line for each case of all of them. What the other programs gave is not measured
here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS = 180
"""The time limit of a row."""
_LINES_OF_AN_ERROR = 5
_8B, _05B, _INT4 = "--shape minicpm4-8b", "--shape minicpm4-0.5b", "--weight-bits 4"
_SHORT, _LONG, _SPARSE = "--max-context 2048", "--max-context 131072", "--sparse {}"
_MANY = "--case 1024:64:8 --case 1024:192:32 --case 1024:64:64"
_MANY_SMALL = "--case 1024:192:8 --case 1024:192:32 --case 1024:192:64"
_MANY_PORTABLE = "--case 1024:192:8 --case 1024:192:12 --case 1024:192:32"
_MANY_LONG = "--case 8000:192:8 --case 32512:256:8"
_SHORT_PROMPTS = "--repeats 5 " + " ".join(f"--case {tokens}:2" for tokens in (8, 60, 120, 250, 500, 600, 1000))
# Prompts of 128K and more take seconds, and are measured once behind a warm-up.
_AT_1K, _AT_32K, _AT_128K = "--case 1024:256", "--context 32K", "--context 128K --repeats 1"
_TREE = f"{_8B} --draft eagle2 --draft-weight-bits 4 --draft-vocab 32768 --draft-head-bits 4 --simulate-accept 2.5"
_NODES_12 = f"{_TREE} --draft-iters 2 --tree-size 12"
_HEAD_8, _WINDOW, _2B = "--lm-head-bits 8", "--draft-window 1024", "--shape minicpm5-2b"
_CHAIN = "--draft dspark --draft-weight-bits 4 --draft-head-bits 4 --draft-iters 7 --simulate-accept 4.05"


@dataclass(frozen=True)
class Row:
    """One `cpmrt bench` with these options; `is_portable`: with the kernels of older GPUs."""

    name: str
    options: str
    is_portable: bool = False

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "cpmrt", "bench", *shlex.split(self.options)]


def _minicpm5(name: str, shape: str) -> tuple[Row, ...]:
    """Return the rows of a MiniCPM5 in 4 and 16 bits, with a head in 8 and in 16 bits."""
    packed, plain = f"--shape {shape} {_INT4}", f"--shape {shape}"
    return (
        Row(f"{name} int4, 8-bit head", f"{packed} {_HEAD_8} {_LONG} {_AT_1K} {_AT_32K}"),
        Row(f"{name} int4, 8-bit head, 128K", f"{packed} {_HEAD_8} {_LONG} {_AT_128K}"),
        Row(f"{name} int4, 16-bit head", f"{packed} {_SHORT} {_AT_1K}"),
        Row(f"{name} bf16, 8-bit head", f"{plain} {_HEAD_8} {_SHORT} {_AT_1K}"),
        Row(f"{name} bf16", f"{plain} {_LONG} {_AT_1K} {_AT_32K}"),
        Row(f"{name} bf16, 128K", f"{plain} {_LONG} {_AT_128K}"),
    )


ROWS = (
    Row("8b int4", f"{_8B} {_INT4} {_LONG} {_AT_1K} --context 8K {_AT_32K}"),
    Row("8b int4, 128K", f"{_8B} {_INT4} {_LONG} {_AT_128K}"),
    Row("8b int4, whole head", f"{_8B} {_INT4} --no-lm-head-screen {_SHORT} {_AT_1K}"),
    Row("8b bf16", f"{_8B} {_LONG} {_AT_1K} --context 8K {_AT_32K}"),
    Row("8b bf16, 128K", f"{_8B} {_LONG} {_AT_128K}"),
    Row("05b int4", f"{_05B} {_INT4} {_SHORT} {_AT_1K}"),
    Row("05b bf16", f"{_05B} {_SHORT} {_AT_1K}"),
    Row("8b int4, sequences", f"{_8B} {_INT4} {_SHORT} {_MANY}"),
    Row("8b int4, short prompts", f"{_8B} {_INT4} {_SHORT} {_SHORT_PROMPTS}"),
    Row("8b ternary, short prompts", f"{_8B} --weight-bits 2 {_SHORT} {_SHORT_PROMPTS}"),
    Row("8b Q4_K_M, short prompts", f"{_8B} --block-type Q4_K_M {_SHORT} {_SHORT_PROMPTS}"),
    Row("8b bf16, short prompts", f"{_8B} {_SHORT} {_SHORT_PROMPTS}"),
    Row("05b int4, short prompts", f"{_05B} {_INT4} {_SHORT} {_SHORT_PROMPTS}"),
    Row("8b int4, portable, short prompts", f"{_8B} {_INT4} {_SHORT} {_SHORT_PROMPTS}", is_portable=True),
    Row("8b Q4_K_M, portable, short prompts", f"{_8B} --block-type Q4_K_M {_SHORT} {_SHORT_PROMPTS}", is_portable=True),
    Row("8b int4, sparse", f"{_8B} {_INT4} {_SPARSE} {_LONG} {_AT_1K} {_AT_32K}"),
    Row("8b int4, sparse, 128K", f"{_8B} {_INT4} {_SPARSE} {_LONG} {_AT_128K}"),
    Row("8b int4, 12 nodes", f"{_NODES_12} {_INT4} {_SHORT} {_AT_1K}"),
    Row("8b int4, 32 nodes", f"{_TREE} {_INT4} --draft-iters 4 --tree-size 32 {_SHORT} {_AT_1K}"),
    Row("8b bf16, 12 nodes", f"{_NODES_12} {_SHORT} {_AT_1K}"),
    Row("8b int4, sparse, 12 nodes, 128K", f"{_NODES_12} {_INT4} {_SPARSE} {_LONG} {_AT_128K}"),
    Row("8b int4, sparse, 12 nodes, window, 128K", f"{_NODES_12} {_WINDOW} {_INT4} {_SPARSE} {_LONG} {_AT_128K}"),
    Row("8b int4, portable", f"{_8B} {_INT4} {_LONG} {_AT_1K} --context 8K {_AT_32K}", is_portable=True),
    Row("8b int4, portable, sequences", f"{_8B} {_INT4} {_SHORT} {_MANY_PORTABLE}", is_portable=True),
    Row("8b int4, 12 nodes, portable", f"{_NODES_12} {_INT4} {_SHORT} {_AT_1K}", is_portable=True),
    Row("8b bf16, portable", f"{_8B} {_SHORT} {_AT_1K}", is_portable=True),
    Row("05b bf16, portable", f"{_05B} {_SHORT} {_AT_1K}", is_portable=True),
    *_minicpm5("2b", "minicpm5-2b"),
    *_minicpm5("1b", "minicpm5-1b"),
    Row("2b int4, sequences", f"{_2B} {_INT4} {_HEAD_8} {_SHORT} {_MANY_SMALL}"),
    Row("2b int4, dspark", f"{_2B} {_INT4} {_HEAD_8} {_CHAIN} {_SHORT} --case 960:256"),
    Row("05b int4, sequences", f"{_05B} {_INT4} {_SHORT} {_MANY_SMALL}"),
    Row("8b bf16, sparse", f"{_8B} {_SPARSE} {_LONG} {_AT_32K}"),
    Row("8b bf16, sparse, 128K", f"{_8B} {_SPARSE} {_LONG} {_AT_128K}"),
    Row("8b bf16, sequences", f"{_8B} {_SHORT} --case 1024:64:8"),
    Row("8b int4, fp8", f"{_8B} {_INT4} --kv-dtype fp8 {_LONG} {_AT_32K}"),
    Row("8b int4, fp8, 128K", f"{_8B} {_INT4} --kv-dtype fp8 {_LONG} {_AT_128K}"),
    Row("moe int4", f"--shape minicpm-moe-8x2b {_INT4} {_SHORT} {_AT_1K}"),
    Row("moe bf16", f"--shape minicpm-moe-8x2b {_SHORT} {_AT_1K}"),
    Row("3-4b int4", f"--shape minicpm3-4b {_INT4} --max-context 32768 {_AT_1K} {_AT_32K}"),
    Row("3-4b bf16", f"--shape minicpm3-4b --max-context 32768 {_AT_1K} {_AT_32K}"),
    Row("8b Q4_K_M", f"{_8B} --block-type Q4_K_M {_SHORT} {_AT_1K}"),
    Row("8b Q8_0", f"{_8B} --block-type Q8_0 {_SHORT} {_AT_1K}"),
    Row("8b ternary", f"{_8B} --weight-bits 2 {_SHORT} {_AT_1K}"),
    Row("8b ternary, 8-bit head", f"{_8B} --weight-bits 2 {_HEAD_8} {_SHORT} {_AT_1K}"),
    Row("sala int4", f"--shape minicpm-sala-9b {_INT4} {_LONG} --prefill-chunk 4096 {_AT_1K}"),
    Row("sala int4, 128K", f"--shape minicpm-sala-9b {_INT4} {_LONG} --prefill-chunk 4096 {_AT_128K}"),
    Row("sala int4, sequences", f"--shape minicpm-sala-9b {_INT4} {_SHORT} --case 1024:64:8"),
    Row("sala bf16", f"--shape minicpm-sala-9b {_LONG} --prefill-chunk 4096 {_AT_1K}"),
    Row("sala bf16, 128K", f"--shape minicpm-sala-9b {_LONG} --prefill-chunk 4096 {_AT_128K}"),
    Row("8b int4, long sequences", f"{_8B} {_INT4} --max-context 32768 --repeats 1 {_MANY_LONG}"),
    Row("starts, 05b int4", f"{_05B} {_INT4} {_SHORT} --case 64:32 --startup"),
    Row("starts, 05b bf16", f"{_05B} {_SHORT} --case 64:32 --startup"),
    Row("starts, 8b bf16", f"{_8B} {_SHORT} --case 64:32 --startup"),
    Row("8b int4, sparse, 512K", f"{_8B} {_INT4} {_SPARSE} --max-context 524288 --context 512K --repeats 1"),
)
_COLUMNS = (
    "row", "case", "decode, tok/s", "step, ms", "prefill, tok/s", "first token, ms", "decode, J a token",
    "prefill, J a token",
)  # fmt: skip


def lines_of(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line of the table for each case of a row's report."""
    for case in report["cases"]:
        found, case_of = case["measurement"], case["measurement"]["case"]
        figures = (
            f"{found['decode_tokens_per_s']:,.1f}", f"{found['step_ms_p50']:.3f}",
            f"{found['prefill_tokens_per_s']:,.0f}", f"{found['first_token_ms']:.1f}",
            _joules(case["decode"]), _joules(case["prefill"]),
        )  # fmt: skip
        asked = f"{case_of['prompt_tokens']}:{case_of['new_tokens']}:{case_of['sequences']}"
        yield f"| {name} | {asked} | {' | '.join(figures)} |"
    if report["process_to_first_token_s"]:
        yield f"| {name} | a new process | {report['process_to_first_token_s']:.2f} s to its first token | | | | | |"


def _joules(phase: Mapping[str, Any]) -> str:
    value = phase["joules_per_token"]
    return "-" if value is None else f"{value:.3f}"


def file_name(row: Row) -> str:
    """Return the name of the file with a row's report."""
    return re.sub("[^a-z0-9]+", "_", row.name.lower()) + ".json"


def measure(row: Row, folder: Path) -> dict[str, Any] | None:
    """Run a row and return its report, which is also written to the folder; None, after a message, where it fails."""
    path = folder.resolve() / file_name(row)
    path.unlink(missing_ok=True)
    env = os.environ | ({"CPMRT_PORTABLE": "1"} if row.is_portable else {})
    try:
        done = subprocess.run(
            [*row.command, "--json", str(path)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        print(f"{row.name}: not done after {MOST_SECONDS} s", flush=True)
        return None
    if done.returncode or not path.exists():
        print(f"{row.name}: exit code {done.returncode}", *done.stderr.splitlines()[-_LINES_OF_AN_ERROR:], sep="\n  ")
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def run(rows: Sequence[Row], folder: Path, seconds: float) -> bool:
    """Measure the rows, and write their table; return whether all of them were measured."""
    folder.mkdir(parents=True, exist_ok=True)
    started, reports = time.monotonic(), list[dict[str, Any]]()
    table = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for row in rows:
        elapsed = time.monotonic() - started
        if elapsed > seconds:
            print(f"{row.name}: not begun within {seconds:g} s", flush=True)
            continue
        report = measure(row, folder)
        if report is None:
            continue
        reports.append(report)
        table += (lines := list(lines_of(row.name, report)))
        print(*(f"[{elapsed:.0f} s] {line}" for line in lines), sep="\n", flush=True)
        (folder / "tables.md").write_text("\n".join([_machine(reports), "", *table, ""]), encoding="utf-8")
    return len(reports) == len(rows)


def _machine(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the machine that all rows were measured on."""
    first, rates = reports[0], [report["read_gb_per_s"] / 1e3 for report in reports if report["read_gb_per_s"]]
    speed = f", memory reads {min(rates):.2f} to {max(rates):.2f} TB/s" if rates else ""
    return f"{first['device'].get('name', 'no GPU')}, {first['date'][:10]}{speed}."


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", type=_pattern, metavar="REGEX", help="the rows whose name this finds")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="begin no row after this time")
    args = parser.parse_args(arguments)
    rows = [row for row in ROWS if args.only is None or args.only.search(row.name)]
    if not rows:
        parser.error(f"no row's name has {args.only.pattern!r}; names are {'; '.join(row.name for row in ROWS)}")
    return 0 if run(rows, args.out, args.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
