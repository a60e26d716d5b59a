"""The virtual environment of tools/dev.py: `.venv` beside pyproject.toml, made when it is needed and kept up to date.

Standard library only. If the environment is up to date the cost is one small file read.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

if sys.version_info < (3, 10):  # noqa: UP036 - this file also meets Pythons that the package does not support
    sys.exit(f"tools/dev.py: cpmrt needs Python 3.10 or newer, this is {sys.version.split()[0]}; run it with one")

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "cpmrt-install.json"
LOG = VENV / "cpmrt-install.log"
"""The output of venv and pip when they last ran."""
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def fail(message: str, code: int = 1) -> NoReturn:
    """Write `message` on one line of stderr and exit."""
    print(f"tools/dev.py: {message}", file=sys.stderr)
    raise SystemExit(code)


def note(message: str) -> None:
    """Write a line of progress to stderr: stdout belongs to the command that is run."""
    print(f"tools/dev.py: {message}", file=sys.stderr, flush=True)


def run_quietly(what: str, command: Sequence[str | Path]) -> int:
    """Run a command whose output goes to the log, and return its exit code. One line of stderr says `what` is done.

    On a terminal it is followed by a spinner, the seconds and the last words of the log.
    """
    import subprocess

    begun, is_terminal = time.monotonic(), sys.stderr.isatty()
    if not is_terminal:
        note(what)
    with LOG.open("ab") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as process:
        for frame in itertools.cycle("|/-\\"):
            if is_terminal:
                draw(f"{what} {frame} {time.monotonic() - begun:.0f} s  {last_words(LOG)}")
            try:
                code = process.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                continue
    if is_terminal:
        draw(f"{what}: {f'failed with exit code {code}' if code else f'{time.monotonic() - begun:.0f} s'}\n")
    return code


def draw(line: str) -> None:
    """Write over the last line of the terminal; a line that would wrap is cut."""
    import shutil

    text = f"tools/dev.py: {line}"
    end = "\n" if text.endswith("\n") else ""
    print(f"\r\033[K{text.rstrip()[: shutil.get_terminal_size().columns - 1]}", end=end, file=sys.stderr, flush=True)


def last_words(path: Path) -> str:
    """Return the first two words of the last line of a log, such as "Downloading numpy-2.4.6"."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        lines = file.read().decode("utf-8", "replace").split("\n")
    words = next((line for line in reversed(lines) if line.strip()), "").split()
    return " ".join(words[:2])


def cuda_driver_version(initialise: bool) -> int:
    """Return the CUDA version of the NVIDIA driver (12080 is 12.8), 0 without a driver.

    With `initialise` it is also 0 if `cuInit` fails. That call takes a large part of a second on a big machine; the
    version can be read without it.
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
    """Return the name of the extra whose CUDA wheels this driver runs, '' if there is none."""
    if driver_version >= 13000:
        return "cuda13"
    return "cuda12" if driver_version >= 12000 else ""


def defined_extras(pyproject: str) -> set[str]:
    """Return the names in `[project.optional-dependencies]`, found as text, as tomllib came only with Python 3.11."""
    extras, inside = set(), False
    for line in pyproject.splitlines():
        if line.startswith("["):
            inside = line.split("#")[0].strip() == "[project.optional-dependencies]"
        elif inside and line[:1].isalpha() and "=" in line:
            extras.add(line.split("=")[0].strip())
    return extras


def pyproject_hash() -> str:
    """Return the hash of pyproject.toml, which decides whether the installed package and tools are still right."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def read_stamp() -> dict[str, Any]:
    """Return the record of what is installed; {} if there is none, {"python": ""} if it is unreadable.

    `python` (version) and `root` (checkout) are those of the venv; `python` is '' while it is being made. `pyproject`
    is '' while pip runs.
    """
    try:
        stamp = json.loads(STAMP.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return {"python": ""}
    return stamp if isinstance(stamp, dict) else {"python": ""}


def write_stamp(python: str, pyproject: str = "", driver: int = 0, extras: tuple[str, ...] = ()) -> None:
    """Write the record of what is installed, in one step, so that no other process reads half of it."""
    stamp = {"python": python, "root": str(ROOT), "pyproject": pyproject, "driver": driver, "extras": extras}
    fresh = STAMP.with_suffix(".new")
    fresh.write_text(json.dumps(stamp))
    fresh.replace(STAMP)


def is_current(stamp: dict[str, Any], wanted: set[str]) -> bool:
    """Whether the venv was made for this pyproject.toml and this driver, with at least the `wanted` extras."""
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
    """Hold a lock on pyproject.toml, which is outside the venv and always there, so that no lock file is needed."""
    with open(ROOT / "pyproject.toml", "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for another tools/dev.py that is installing")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure_installed(wanted: set[str]) -> None:
    """Make the venv and install cpmrt with the `wanted` extras, unless both are up to date."""
    if is_current(read_stamp(), wanted):
        return
    with only_one_installer():
        stamp = read_stamp()
        if is_current(stamp, wanted):
            return
        ours = not stamp or (stamp.get("python"), stamp.get("root")) == (PYTHON_VERSION, str(ROOT))
        kept = set(stamp.get("extras", ())) - {"cuda12", "cuda13"}
        if not (ours and venv_works()):
            if not stamp and VENV.is_dir() and any(VENV.iterdir()):
                fail(
                    f"{VENV} has no pip of Python {PYTHON_VERSION}, and was not made by this program, which would "
                    "replace what is in it; delete it, or move it away"
                )
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
    """Make a new, empty venv in place of whatever is there.

    The stamp says so from the beginning, so that after an interruption the venv is made again.
    """
    import importlib.util
    import shutil

    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        fail(
            f"Python {PYTHON_VERSION} here cannot make a venv (no ensurepip); install the package python3-venv "
            f"(Debian, Ubuntu: sudo apt install python{PYTHON_VERSION}-venv) and try again"
        )
    if VENV.is_symlink():  # its target belongs to another checkout, which still needs it
        VENV.unlink()
    VENV.mkdir(exist_ok=True)
    write_stamp("")
    for entry in VENV.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != STAMP:
            entry.unlink()
    # Not sys.executable: that may be the Python of the venv just emptied.
    base_python = getattr(sys, "_base_executable", None) or sys.executable
    code = run_quietly(f"making {VENV.name} with Python {PYTHON_VERSION}", [base_python, "-m", "venv", VENV])
    if code:
        fail(f"python -m venv failed (exit code {code}); what it said is in {LOG}", code)


def pip_install(extras: tuple[str, ...]) -> None:
    """Install cpmrt as an editable package. Exits the program on failure, naming the log with pip's output."""
    target = "." + (f"[{','.join(extras)}]" if extras else "")
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--editable", target]
    code = run_quietly(f"installing cpmrt{target[1:]} into {VENV.name}", command)
    if code == 0:
        note(f"done; `source {os.path.relpath(VENV / 'bin' / 'activate')}` puts the command cpmrt on the path")
        return
    said = LOG.read_text(encoding="utf-8", errors="replace")
    for line in said.splitlines():
        if line.startswith("ERROR:"):
            print(line, file=sys.stderr)
    if "connection broken by" in " ".join(said.split()):
        note("the package index cannot be reached: check the network, the proxy settings and PIP_INDEX_URL")
    # A process that a signal ended has a negative code; shells report that as 128 plus the signal.
    code = code if code > 0 else 128 - code
    fail(f"pip could not install cpmrt (exit code {code}); all that it said is in {LOG}", code)
