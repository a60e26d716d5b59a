"""Developer entry: makes `.venv` beside pyproject.toml when it is needed, then runs cpmrt or its checks in it.

Standard library only. After the first call the cost is one small file read and an `execv`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

if sys.version_info < (3, 10):  # noqa: UP036 - this file also meets Pythons that the package does not support
    sys.exit(f"tools/dev.py: cpmrt needs Python 3.10 or newer, this is {sys.version.split()[0]}; run it with one")

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "cpmrt-install.json"
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

HELP = """\
usage: python3 tools/dev.py COMMAND [ARGUMENTS...]

  generate, chat, serve, plan, inspect, doctor, ...
                        run that cpmrt command: tools/dev.py generate "def read_lines(path):"
  test                  the whole check: ruff, mypy, import-linter, the fast tests, then the slow ones
  test PYTEST_ARGS...   only pytest, with these arguments, in the repository root
  gpu [--quick] [--logs DIR]
                        on a GPU machine: GPU tests, sanitizer and benchmark, with the packages of this Python
  --help                this text

The first call makes .venv in the repository root and installs cpmrt there (editable), with the CUDA extra
that fits the NVIDIA driver if there is one; `serve` adds what the server needs, `test` the development tools.
It is done again only when pyproject.toml, the Python version or the driver changes. To start afresh, delete .venv."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Say `message` on one line of stderr and exit."""
    print(f"tools/dev.py: {message}", file=sys.stderr)
    raise SystemExit(code)


def note(message: str) -> None:
    """Progress goes to stderr: stdout belongs to the command that is run."""
    print(f"tools/dev.py: {message}", file=sys.stderr, flush=True)


def cuda_driver_version(initialise: bool) -> int:
    """CUDA version of the NVIDIA driver (12080 is 12.8), 0 where there is none or, if asked, it does not start.

    `cuInit` takes a large part of a second on a big machine; the version alone is read without it.
    """
    import ctypes

    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if initialise:
        error = libcuda.cuInit(0)
        if error:
            note(f"there is an NVIDIA driver, but cuInit fails with CUDA error {error}: going on without CUDA")
            return 0
    version = ctypes.c_int(0)
    return version.value if libcuda.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def cuda_extra(driver_version: int) -> str:
    """The extra whose CUDA wheels this driver runs, '' if there is none."""
    if driver_version >= 13000:
        return "cuda13"
    return "cuda12" if driver_version >= 12000 else ""


def defined_extras(pyproject: str) -> set[str]:
    """Names in `[project.optional-dependencies]`, found in the text: tomllib came with Python 3.11."""
    extras, inside = set(), False
    for line in pyproject.splitlines():
        if line.startswith("["):
            inside = line.split("#")[0].strip() == "[project.optional-dependencies]"
        elif inside and line[:1].isalpha() and "=" in line:
            extras.add(line.split("=")[0].strip())
    return extras


def pyproject_hash() -> str:
    """What decides whether the installed package and tools are still the ones asked for."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def read_stamp() -> dict[str, Any]:
    """What is installed, {} if that is not known.

    `python` and `root` are those of the venv, '' while it is being made. `pyproject` is '' while pip runs.
    """
    try:
        stamp = json.loads(STAMP.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return {"python": ""}
    return stamp if isinstance(stamp, dict) else {"python": ""}


def write_stamp(python: str, pyproject: str = "", driver: int = 0, extras: tuple[str, ...] = ()) -> None:
    """Replace the stamp in one step, so that no other process reads half of it."""
    stamp = {"python": python, "root": str(ROOT), "pyproject": pyproject, "driver": driver, "extras": extras}
    fresh = STAMP.with_suffix(".new")
    fresh.write_text(json.dumps(stamp))
    fresh.replace(STAMP)


def is_current(stamp: dict[str, Any], wanted: set[str]) -> bool:
    """Whether the venv holds this pyproject.toml with at least the `wanted` extras and the driver's CUDA."""
    if (stamp.get("python"), stamp.get("root")) != (PYTHON_VERSION, str(ROOT)):
        return False
    if stamp.get("pyproject") != pyproject_hash() or not wanted <= set(stamp.get("extras", ())):
        return False
    if not (os.access(PYTHON, os.X_OK) and os.access(VENV / "bin" / "cpmrt", os.R_OK)):
        return False
    recorded = stamp.get("driver", 0)
    return bool(recorded == cuda_driver_version(initialise=not recorded))


@contextlib.contextmanager
def only_one_installer() -> Iterator[None]:
    """Hold a lock on pyproject.toml: it is outside the venv, always there, and needs no file of its own."""
    with open(ROOT / "pyproject.toml", "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for another tools/dev.py that is installing")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure_installed(wanted: set[str]) -> None:
    """Make the venv and install cpmrt with the `wanted` extras, unless that is already so."""
    if is_current(read_stamp(), wanted):
        return
    with only_one_installer():
        stamp = read_stamp()
        if is_current(stamp, wanted):
            return
        ours = not stamp or (stamp.get("python"), stamp.get("root")) == (PYTHON_VERSION, str(ROOT))
        kept = set(stamp.get("extras", ())) - {"cuda12", "cuda13"}
        if not (ours and venv_works()):
            make_venv()
            kept = set()
        driver = cuda_driver_version(initialise=True)
        pyproject = pyproject_hash()
        available = defined_extras((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        extras = tuple(sorted(wanted | ((kept | {cuda_extra(driver)}) & available)))
        write_stamp(PYTHON_VERSION)
        pip_install(extras)
        write_stamp(PYTHON_VERSION, pyproject, driver, extras)


def venv_works() -> bool:
    """Whether the venv has a Python of this version, and a pip."""
    import subprocess

    probe = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        found = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return found.returncode == 0 and found.stdout.strip() == PYTHON_VERSION


def make_venv() -> None:
    """A new, empty venv in place of whatever is there. The stamp goes last: interrupted, it is made again."""
    import importlib.util
    import shutil
    import subprocess

    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        fail(
            f"Python {PYTHON_VERSION} here cannot make a venv (no ensurepip); install the package python3-venv "
            f"(Debian, Ubuntu: sudo apt install python{PYTHON_VERSION}-venv) and try again"
        )
    note(f"making {VENV} with Python {PYTHON_VERSION}")
    VENV.mkdir(exist_ok=True)
    write_stamp("")
    for entry in VENV.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != STAMP:
            entry.unlink()
    # Not sys.executable: that may be the Python of the venv just emptied.
    base_python = getattr(sys, "_base_executable", None) or sys.executable
    made = subprocess.run([base_python, "-m", "venv", VENV], capture_output=True, text=True, check=False)
    if made.returncode:
        sys.stderr.write(made.stdout + made.stderr)
        fail(f"python -m venv failed (exit code {made.returncode})", made.returncode)


def pip_install(extras: tuple[str, ...]) -> None:
    """Install cpmrt editable. pip's output goes to stderr as it comes; its failure ends the program."""
    import subprocess

    target = "." + (f"[{','.join(extras)}]" if extras else "")
    note(f"installing cpmrt{target[1:]} into {VENV}")
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--editable", target]
    complaints = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as pip:
        assert pip.stderr is not None
        for line in pip.stderr:
            sys.stderr.write(line)
            complaints.append(line)
    if pip.returncode == 0:
        return
    if "connection broken by" in " ".join(" ".join(complaints).split()):
        note("the package index cannot be reached: check the network, the proxy settings and PIP_INDEX_URL")
    # A signal's negative number is no exit code; shells report it as 128 and the signal.
    code = pip.returncode if pip.returncode > 0 else 128 - pip.returncode
    fail(f"pip could not install cpmrt (exit code {code}); its message is above", code)


def execute(*arguments: str) -> NoReturn:
    """Become the venv's Python, so that signals, terminal and exit code are those of the command itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(PYTHON, [str(PYTHON), *arguments])


def run_checks() -> int:
    """Run every stage even if one fails, one line each with its time; 1 if any failed."""
    import subprocess

    stages = {
        "ruff check": ("-m", "ruff", "check", "."),
        "mypy": ("-m", "mypy"),
        "lint-imports": (str(VENV / "bin" / "lint-imports"),),
        "pytest (fast)": ("-m", "pytest", "-m", "not slow"),
        "pytest (slow)": ("-m", "pytest", "-m", "slow"),
    }
    outcomes, started = {}, time.monotonic()
    for name, arguments in stages.items():
        begun = time.monotonic()
        outcomes[name] = subprocess.call([PYTHON, *arguments], cwd=ROOT)
        verdict = f"FAILED (exit code {outcomes[name]})" if outcomes[name] else "ok"
        print(f"[{name}] {verdict}, {time.monotonic() - begun:.1f} s", flush=True)
    failed = [name for name, code in outcomes.items() if code]
    summary = f"FAILED: {', '.join(failed)}" if failed else f"all {len(stages)} stages passed"
    print(f"{summary} ({time.monotonic() - started:.0f} s)", flush=True)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    """Run one command; the exit code."""
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
    ensure_installed({"dev"})
    if arguments[1:]:
        os.chdir(ROOT)
        execute("-m", "pytest", *arguments[1:])
    return run_checks()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(str(error))
