"""tools/dev.py on a toy project whose build backend lies beside it, so that pip needs no network."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from terminal import shown_on_terminal

ROOT = Path(__file__).resolve().parents[2]

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""

BACKEND = '''\
"""Builds an editable wheel of the toy package beside this file."""
import pathlib
import zipfile

REQUIRES = ""


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    files = {
        "cpmrt.pth": str(pathlib.Path(__file__).parent),
        "cpmrt-0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: cpmrt\\nVersion: 0\\n" + REQUIRES,
        "cpmrt-0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        "cpmrt-0.dist-info/entry_points.txt": "[console_scripts]\\ncpmrt = cpmrt:main\\n",
        "cpmrt-0.dist-info/RECORD": "",
    }
    name = "cpmrt-0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
'''

PACKAGE = '''\
"""A cpmrt that says how it was called."""
import os
import sys


def main():
    print(os.getcwd(), *sys.argv[1:], sep="|")
    return 7
'''

OFFLINE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
    "PIP_INDEX_URL": "http://127.0.0.1:9/",
    "PIP_RETRIES": "1",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with tools/dev.py and the toy package."""
    root = tmp_path / "a project"
    (root / "tools").mkdir(parents=True)
    (root / "elsewhere").mkdir()
    for name in ("dev.py", "dev_venv.py"):
        shutil.copy(ROOT / "tools" / name, root / "tools")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "cpmrt.py").write_text(PACKAGE)
    return root


def start(project: Path, *arguments: str) -> subprocess.Popen[str]:
    """Call dev.py by a relative path from a folder inside the project."""
    return subprocess.Popen(
        [sys.executable, os.path.join("..", "tools", "dev.py"), *arguments],
        cwd=project / "elsewhere",
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **OFFLINE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def call(project: Path, *arguments: str) -> tuple[int, str, str]:
    """Call dev.py and return its exit code, stdout and stderr."""
    process = start(project, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def dev() -> Iterator[ModuleType]:
    """tools/dev.py as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    yield importlib.import_module("dev")
    sys.path.remove(str(ROOT / "tools"))


@pytest.fixture
def venv(dev: ModuleType) -> ModuleType:
    """The module tools/dev_venv.py, which installs."""
    return importlib.import_module("dev_venv")


@pytest.mark.parametrize(
    ("driver_version", "extra"),
    [(0, ""), (11080, ""), (12000, "cuda12"), (12090, "cuda12"), (13000, "cuda13"), (14010, "cuda13")],
)
def test_the_driver_decides_the_cuda_extra(venv: ModuleType, driver_version: int, extra: str) -> None:
    assert venv.cuda_extra(driver_version) == extra


def test_extras_are_found_in_the_text_of_pyproject(venv: ModuleType) -> None:
    extras = '[project.optional-dependencies] # these\ndev = [\n  "a=1",\n]\ncuda12=["b"]\n'
    assert venv.defined_extras(f'[project]\nname = "x"\n{extras}[other]\ny = 1\n') == {"dev", "cuda12"}
    assert "dev" in venv.defined_extras((ROOT / "pyproject.toml").read_text())


def test_an_extra_that_was_installed_stays_when_another_is_asked_for(
    venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[tuple[str, ...]] = []
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\ndev = []\nserver = []\n')
    monkeypatch.setattr(venv, "ROOT", tmp_path)
    monkeypatch.setattr(venv, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(venv, "venv_works", lambda: True)
    monkeypatch.setattr(venv, "cuda_driver_version", lambda initialise: 0)
    monkeypatch.setattr(venv, "pip_install", installed.append)
    for wanted in ({"dev"}, {"server"}):
        venv.ensure_installed(wanted)
    assert installed == [("dev",), ("dev", "server")]


def test_help_needs_no_venv(project: Path) -> None:
    code, out, err = call(project, "--help")
    assert (code, err) == (0, "")
    assert "generate" in out and "test" in out
    assert not (project / ".venv").exists()


def expressions(dev: ModuleType, tier: str) -> list[str]:
    """Return the mark expression of each pytest stage of a tier."""
    options = [stage.arguments for stage in dev.pytest_stages(tier)]
    return [arguments[arguments.index("-m", 2) + 1] for arguments in options]


def test_every_test_without_a_gpu_is_in_one_tier_and_only_drawn_examples_are_in_both(dev: ModuleType) -> None:
    names = ("all", "alone", "gpu", "hypothesis")
    for marks in itertools.product((False, True), repeat=len(names)):
        values = {f"_{name}": value for name, value in zip(names, marks, strict=True)}
        taken = {
            tier: sum(bool(eval(re.sub(r"\b(all|alone|gpu|hypothesis)\b", r"_\1", text), values.copy()))
                      for text in expressions(dev, tier))
            for tier in ("first", "all")
        }  # fmt: skip
        drawn_again = values["_hypothesis"] and not values["_all"] and not values["_alone"]
        assert sum(taken.values()) == (0 if values["_gpu"] else 1 + drawn_again), values


@pytest.mark.parametrize("is_ci", [False, True])
def test_examples_are_drawn_with_a_seed_that_is_said(
    dev: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_ci: bool
) -> None:
    monkeypatch.setenv("CI", "true") if is_ci else monkeypatch.delenv("CI", raising=False)
    seeds = set()
    for _ in range(2):
        (option,) = [part for part in dev.pytest_stages("all")[0].arguments if "--hypothesis-seed=" in part]
        assert option in capsys.readouterr().out
        seeds.add(option)
    assert len(seeds) == (1 if is_ci else 2)
    assert not any("seed" in part for part in dev.pytest_stages("first")[0].arguments)


def test_one_failure_fails_the_check_and_every_stage_has_its_line(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    faulty = dev.Stage("text", ("-c", "print('the reason'); raise SystemExit(3)"))
    monkeypatch.setattr(dev, "PYTHON", sys.executable)
    monkeypatch.setattr(dev, "CHECKS_OF_TEXT", (faulty, dev.Stage("good", ("-c", "print('not shown')"))))
    monkeypatch.setattr(dev, "pytest_stages", lambda tier: [dev.Stage(tier, ("-c", f"print('of {tier}')"))])
    assert dev.run_checks(("first", "all"), 7.2) == 1
    *_, text, good, first, rest, total, hint = (out := capfd.readouterr().out).splitlines()
    assert "the reason\n" in out and "of first\n" in out and "not shown" not in out
    assert text.startswith("text") and text.endswith("FAILED (exit code 3)")
    assert [line.split()[0] for line in (good, first, rest)] == ["good", "first", "all"]
    assert total.startswith("FAILED: text in ") and total.endswith("after 7 s of installation")
    assert "dev.py gpu" in hint
    assert dev.run_checks(("all",), 0) == 0
    assert "all 1 stages passed" in capfd.readouterr().out


def test_ci_runs_the_command_of_the_readme_and_then_only_the_rest(dev: ModuleType) -> None:
    commands = re.findall(r"^python3 tools/dev.py (.*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert [tuple(command.split()[1:]) for command in commands] == [(), ("--rest",)]
    assert dev.TIERS[()] + dev.TIERS[("--rest",)] == dev.TIERS[("--all",)]


@pytest.mark.all
def test_first_call_installs_and_second_only_runs(project: Path) -> None:
    expected = f"{project / 'elsewhere'}|generate|def f(|--json\n"
    code, out, err = call(project, "generate", "def f(", "--json")
    assert (code, out) == (7, expected), err
    making, installing, done = err.splitlines()  # one line a stage
    assert "making .venv with Python" in making and installing.endswith("installing cpmrt into .venv")
    assert done.endswith("`source ../.venv/bin/activate` puts the command cpmrt on the path")
    assert call(project, "generate", "def f(", "--json") == (7, expected, "")


@pytest.mark.all
def test_changed_project_and_broken_venv_are_mended(project: Path) -> None:
    call(project, "plan")
    (project / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    code, _, err = call(project, "plan")
    assert code == 7 and "installing" in err and "making" not in err
    (project / ".venv" / "bin" / "python").unlink()
    code, _, err = call(project, "plan")
    assert code == 7 and "making" in err
    (project / ".venv" / "cpmrt-install.json").write_text("{")
    code, _, err = call(project, "plan")
    assert code == 7 and "making" in err


@pytest.mark.all
def test_a_venv_that_is_linked_in_is_left_alone(project: Path, tmp_path: Path) -> None:
    """A linked virtual environment is replaced by a new one in this checkout, and its target is left as it was."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "cpmrt-install.json").write_text('{"python": "3.11", "root": "/another/checkout"}')
    (other / "pyvenv.cfg").write_text("of the other")
    (project / ".venv").symlink_to(other)
    assert call(project, "generate")[0] == 7
    assert not (project / ".venv").is_symlink() and (project / ".venv" / "pyvenv.cfg").exists()
    assert (other / "pyvenv.cfg").read_text() == "of the other"
    assert "another/checkout" in (other / "cpmrt-install.json").read_text()


def test_a_venv_of_somebody_else_without_pip_is_not_replaced(project: Path) -> None:
    """A virtual environment without pip that dev.py did not make, as uv makes them, is refused and not replaced."""
    (project / ".venv").mkdir()
    (project / ".venv" / "pyvenv.cfg").write_text("theirs")
    code, out, err = call(project, "generate")
    assert (code, out) == (1, "") and err.count("\n") == 1 and "was not made by this program" in err
    assert [path.name for path in (project / ".venv").iterdir()] == ["pyvenv.cfg"]


@pytest.mark.all
def test_concurrent_first_calls_install_once(project: Path) -> None:
    calls = [start(project, "plan", str(number)) for number in range(3)]
    results = [process.communicate(timeout=120) for process in calls]
    assert [process.returncode for process in calls] == [7, 7, 7], results
    assert sum("installing cpmrt" in err for _, err in results) == 1


@pytest.mark.all
def test_unreachable_index_is_named_and_the_next_call_tries_again(project: Path) -> None:
    backend = project / "backend.py"
    backend.write_text(BACKEND.replace('REQUIRES = ""', 'REQUIRES = "Requires-Dist: not-on-this-disk\\n"'))
    code, out, err = call(project, "plan")
    assert (code, out) == (1, "")
    assert "package index cannot be reached" in err and "No matching distribution found" in err
    last = err.splitlines()[-1]
    assert "pip could not install cpmrt (exit code 1)" in last and len(err.splitlines()) < 8
    log = Path(last.rpartition(" is in ")[2])
    assert "not-on-this-disk" in log.read_text() and "Retrying" in log.read_text() and "Retrying" not in err
    assert "Traceback" not in err
    backend.write_text(BACKEND)
    code, _, err = call(project, "plan")
    assert code == 7 and "making" not in err


def test_a_terminal_sees_a_spinner_and_one_line_of_it_stays(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import dev_venv; "
        "dev_venv.LOG = pathlib.Path(sys.argv[2]); "
        "sys.exit(dev_venv.run_quietly('working', [sys.executable, '-c', "
        "'import time; print(\"Downloading a-1.0 (3 kB)\", flush=True); time.sleep(1.5); raise SystemExit(4)']))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "tools"), str(tmp_path / "log")]
    shown, exit_code = shown_on_terminal(lambda terminal: subprocess.Popen(command, stderr=terminal, stdout=terminal))
    assert exit_code == 4
    drawn = shown.decode().split("\r\033[K")
    assert sum("working" in line and "Downloading a-1.0" in line for line in drawn) >= 2
    assert drawn[-1].strip() == "tools/dev.py: working: failed with exit code 4" and shown.count(b"\n") == 1
    assert (tmp_path / "log").read_text() == "Downloading a-1.0 (3 kB)\n"
