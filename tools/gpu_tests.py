"""The GPU tests side by side, as processes with one BLAS thread each. Called by `tools/gpu_check.py`.

Those marked `alone` compare what is free on the whole device: they run afterwards, one file at a time. A job that does
not pass shows its output, and what there was no time for its names; the last line has the counts, in pytest's words. No
plug-in of pytest is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
MOST_WORKERS = 14
TESTS_OF_A_JOB = 16
"""So many that the start of a process counts for little, so few that all processes end at about the same time."""
LONGEST = ("executors", "linear")
"""What is in the names of files whose tests begin first."""
GOOD = {"passed", "xfailed", "warning", "warnings"}
ENDS = {"PASSED": "passed", "FAILED": "failed", "ERROR": "errors", "SKIPPED": "skipped", "XFAIL": "xfailed"}
"""How a test's own line ends, and what the summary calls it."""


def call_pytest(arguments: Sequence[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest to its end; its two outputs are one text. After so many seconds it is killed, with the return code -9.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [*PYTEST, *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as running:
        try:
            output, _ = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            running.kill()
            output, _ = running.communicate()
    return subprocess.CompletedProcess(command, running.returncode, output)


def collect(marked: str, files: Sequence[str]) -> list[str]:
    """The ids of the tests whose marks fit the expression, in pytest's order. Ends the program if that fails."""
    found = call_pytest(["--collect-only", "-m", marked, *files])
    if found.returncode not in (0, 5):  # 5: there is none
        sys.exit(found.stdout)
    return [line for line in found.stdout.splitlines() if "::" in line]


def jobs_of(ids: Sequence[str], size: int) -> Iterator[list[str]]:
    """The tests of each file, so many at a time."""
    for _, of_file in groupby(ids, file_of):
        names = list(of_file)
        yield from (names[at : at + size] for at in range(0, len(names), size))


def file_of(name: str) -> str:
    """The file in a test's id."""
    return name.partition("::")[0]


class Deadline:
    """When everything has to have ended, if there is such a time."""

    def __init__(self, seconds: float | None):
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """The seconds until then; None: any number."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def named(what: str, names: Sequence[str]) -> Counter[str]:
    """Show the tests that there was no time for, a line each, and count them."""
    print("".join(f"{what}: {name}\n" for name in names), end="", flush=True)
    return Counter({what: len(names)})


def run(job: Sequence[str], deadline: Deadline) -> Counter[str]:
    """How many of these tests passed, failed and so on. Those of a process without a summary are errors."""
    left = deadline.left()
    if left is not None and left < 1:
        return named("not begun", job)
    done = call_pytest(["-vv", *job], left)
    summary = re.findall(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", done.stdout, re.MULTILINE)
    if not summary and deadline.left() == 0:
        ended = dict(re.findall(r"^(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", done.stdout, re.MULTILINE))
        counts = Counter(ENDS[word] for word in ended.values())
        counts += named("unfinished", [name for name in job if name not in ended])
    else:
        items = summary[-1].split(", ") if summary else [f"{len(job)} errors"]
        counts = Counter({what: int(number) for number, what in (item.split() for item in items)})
        if done.returncode and not counts.keys() - GOOD:
            counts["errors"] += 1
    if counts.keys() - GOOD - {"unfinished"}:
        print(f"{'=' * 20} {len(job)} tests from {job[0]} on, exit code {done.returncode}\n{done.stdout}", flush=True)
    return counts


def run_all(marked: str, files: Sequence[str], workers: int, deadline: Deadline) -> Counter[str]:
    """The counts of all tests."""
    totals: Counter[str] = Counter()
    with ThreadPoolExecutor(workers) as pool:
        expressions = [f"({marked}) and {which}" for which in ("not alone", "alone")]
        together, alone = pool.map(lambda expression: collect(expression, files), expressions)
        jobs = list(jobs_of(together, TESTS_OF_A_JOB))
        if deadline.left() is None:
            jobs.sort(key=lambda job: not any(word in file_of(job[0]) for word in LONGEST))
        for counts in pool.map(lambda job: run(job, deadline), jobs):
            totals.update(counts)
    for job in jobs_of(alone, len(alone)):
        totals.update(run(job, deadline))
    return totals


def main(arguments: Sequence[str]) -> int:
    """Parse the options and run; 1 if anything but passing happened, or nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=max(1, min(MOST_WORKERS, cores - 2)), metavar="N")
    parser.add_argument("-m", dest="marked", default="gpu", metavar="EXPRESSION", help="of marks, as pytest takes it")
    parser.add_argument(
        "--seconds", type=float, help="end by then, and count what is not finished; files run in the order given"
    )
    parser.add_argument("files", nargs="*")
    args = parser.parse_args(arguments)
    begun = time.monotonic()
    totals = run_all(args.marked, args.files, args.workers, Deadline(args.seconds))
    counts = ", ".join(f"{number} {what}" for what, number in sorted(totals.items())) or "no tests ran"
    print(f"{counts} in {time.monotonic() - begun:.2f}s", flush=True)
    return int(not totals or not totals.keys() <= GOOD)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
