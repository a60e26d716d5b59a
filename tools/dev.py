"""Developer entry: makes `.venv` beside pyproject.toml when it is needed, then runs cpmrt or its checks in it.

Standard library only. After the first call the cost is one small file read and an `execv`.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from dev_venv import PYTHON, ROOT, VENV, ensure_installed, fail

TIERS = {(): ("first",), ("--all",): ("first", "all"), ("--rest",): ("all",)}
"""Arguments of the command `test` -> the tiers of tests that it runs."""
MOST_WORKERS = 8
CI_SEED = 0

HELP = """\
usage: python3 tools/dev.py COMMAND [ARGUMENTS...]

  generate, chat, serve, plan, inspect, doctor, ...
                        run that cpmrt command: tools/dev.py generate "def load_config(path):"
  test                  ruff, mypy, import-linter and the first tier of tests; some minutes on two cores
  test --all            the same, then what the second tier adds: kernels for every architecture, by both compilers
                        and in all sizes, load, long fuzzing with new examples (the same each time where $CI is set)
  test --rest           only what --all adds
  test PYTEST_ARGS...   only pytest, with these arguments, in the repository root
  gpu [--quick] [--logs DIR]
                        on a GPU machine: GPU tests, sanitizer and benchmark, with the packages of this Python
  --help                this text

The first call makes .venv in the repository root and installs cpmrt there (editable), with the CUDA extra
that fits the NVIDIA driver if there is one; `serve` adds what the server needs, `test` the development tools.
After it `source .venv/bin/activate` puts the command cpmrt on the path.
It is done again only when pyproject.toml, the Python version or the driver changes. To start afresh, delete .venv."""


class Stage(NamedTuple):
    """One command of the checks: its name, and its arguments for the Python of the venv."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] | None = None


class Outcome(NamedTuple):
    """The outcome of a stage, which is a row of the summary."""

    name: str
    verdict: str
    seconds: float
    failed: bool


CHECKS_OF_TEXT = (
    Stage("ruff", ("-m", "ruff", "check", ".")),
    Stage("mypy", ("-m", "mypy")),
    Stage("import-linter", (str(VENV / "bin" / "lint-imports"),)),
)


def execute(*arguments: str) -> NoReturn:
    """Become the venv's Python, so that signals, terminal and exit code are those of the command itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(PYTHON, [str(PYTHON), *arguments])


def test_environment() -> dict[str, str]:
    """Return the environment of the tests. BLAS has one thread in each of the parallel processes, and bytecode is kept,
    as the workers and the many programs that tests start share it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def pytest_stages(tier: str) -> list[Stage]:
    """Return the stages of one tier of tests, each with a process per core.

    The second tier also has a stage for tests that measure the machine, which run alone.
    """
    workers = str(max(2, min(MOST_WORKERS, len(os.sched_getaffinity(0)))))
    side_by_side = ("-m", "pytest", "-q", "-n", workers, "--dist", "worksteal")
    environment = test_environment()
    if tier == "first":
        return [Stage("tests", (*side_by_side, "-m", "not all and not gpu and not alone"), environment)]
    environment["CPMRT_LOAD_SECONDS"] = "20"
    # In CI examples are the same each time, so that a commit fails for what it changed and not by chance.
    seed = CI_SEED if os.environ.get("CI") else int.from_bytes(os.urandom(4), "big")
    drawing = ("--hypothesis-profile=long", f"--hypothesis-seed={seed}")
    print(f"examples: {' '.join(drawing)} draws the same again", flush=True)
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path.relative_to(ROOT)) for path in paths if "mark.alone" in path.read_text(encoding="utf-8")]
    more = (*side_by_side, *drawing, "-m", "(all or hypothesis) and not gpu and not alone")
    alone = ("-m", "pytest", "-q", "-m", "alone and not gpu", *files)
    return [Stage("tests of --all", more, environment), Stage("tests that run alone", alone, environment)]


def run_stage(stage: Stage, is_quiet: bool = False) -> Outcome:
    """Run one command in the repository root. If `is_quiet`, its output is shown only if it fails, in one piece."""
    import subprocess

    begun, told = time.monotonic(), subprocess.PIPE if is_quiet else None
    done = subprocess.run(
        [PYTHON, *stage.arguments], cwd=ROOT, env=stage.environment, stdout=told, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode and done.stdout:
        sys.stdout.buffer.write(done.stdout)
    verdict = f"FAILED (exit code {done.returncode})" if done.returncode else "ok"
    outcome = Outcome(stage.name, verdict, time.monotonic() - begun, bool(done.returncode))
    print(f"[{outcome.name}] {outcome.verdict}, {outcome.seconds:.1f} s", flush=True)
    return outcome


def run_checks(tiers: Sequence[str], installation_s: float) -> int:
    """Run every stage even if one fails, the static checks at the same time as the tests. Return 1 if any failed."""
    from concurrent.futures import ThreadPoolExecutor

    started, quiet = time.monotonic(), CHECKS_OF_TEXT if "first" in tiers else ()
    with ThreadPoolExecutor(1) as beside:
        checks = [beside.submit(run_stage, stage, is_quiet=True) for stage in quiet]
        outcomes = [run_stage(stage) for tier in tiers for stage in pytest_stages(tier)]
        outcomes = [check.result() for check in checks] + outcomes
    width = max(len(outcome.name) for outcome in outcomes)
    print()
    for outcome in outcomes:
        print(f"{outcome.name:<{width}}  {outcome.seconds:6.1f} s  {outcome.verdict}")
    failed = [outcome.name for outcome in outcomes if outcome.failed]
    summary = f"FAILED: {', '.join(failed)}" if failed else f"all {len(outcomes)} stages passed"
    print(f"{summary} in {time.monotonic() - started:.0f} s, after {installation_s:.0f} s of installation", flush=True)
    print("GPU tests are not among them: `tools/dev.py gpu` runs them, on a GPU machine", flush=True)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    """Run one command. Return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if arguments[0] == "gpu":
        # No venv: the machine may have no network, and has its CUDA packages in this interpreter.
        os.execv(sys.executable, [sys.executable, str(ROOT / "tools" / "gpu_check.py"), *arguments[1:]])
    if arguments[0] != "test":
        ensure_installed({"server"} if arguments[0] == "serve" else set())
        # The console script and not `-m`: `-m` would put the caller's folder before the installed packages.
        execute(str(VENV / "bin" / "cpmrt"), *arguments)
    begun = time.monotonic()
    ensure_installed({"dev"})
    tiers = TIERS.get(tuple(arguments[1:]))
    if tiers is None:
        os.chdir(ROOT)
        execute("-m", "pytest", *arguments[1:])
    return run_checks(tiers, time.monotonic() - begun)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(str(error))
