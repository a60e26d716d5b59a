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
"""Tests per process: enough that its start costs little, few enough that all processes end at about the same time."""
LONGEST = ("executors", "linear")
"""Words in the names of the files whose tests begin first, as they take longest."""
GOOD = {"passed", "xfailed", "warning", "warnings"}
ENDS = {"PASSED": "passed", "FAILED": "failed", "ERROR": "errors", "SKIPPED": "skipped", "XFAIL": "xfailed"}
"""The word that ends a test's own line -> its name in the summary."""


def call_pytest(arguments: Sequence[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest and return its result, standard output and error in one text.

    After `seconds` it is killed; the return code is -9 then.
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
    """Return the ids of the tests whose marks fit the expression, in pytest's order. Exits the program on failure."""
    found = call_pytest(["--collect-only", "-m", marked, *files])
    if found.returncode not in (0, 5):  # 5: no test fits
        sys.exit(found.stdout)
    return [line for line in found.stdout.splitlines() if "::" in line]


def jobs_of(ids: Sequence[str], size: int) -> Iterator[list[str]]:
    """Yield the tests of each file, in jobs of at most `size`."""
    for _, of_file in groupby(ids, file_of):
        names = list(of_file)
        yield from (names[at : at + size] for at in range(0, len(names), size))


def file_of(name: str) -> str:
    """Return the file in a test's id."""
    return name.partition("::")[0]


class Deadline:
    """The time at which everything has to end; without `seconds` there is none."""

    def __init__(self, seconds: float | None):
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds that are left, None if there is no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def named(what: str, names: Sequence[str]) -> Counter[str]:
    """Print the tests that there was no time for, one a line after `what`, and return their count."""
    print("".join(f"{what}: {name}\n" for name in names), end="", flush=True)
    return Counter({what: len(names)})


def run(job: Sequence[str], deadline: Deadline) -> Counter[str]:
    """Run these tests and count how many passed, failed and so on. If pytest gives no summary all are errors."""
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
    """Run all tests, those marked `alone` last, and return the counts of their outcomes."""
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
    """Parse the options and run the tests. Return 1 if any did not pass, or if there were none."""
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
