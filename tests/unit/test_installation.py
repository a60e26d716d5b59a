"""The commands that install what is missing: they must work where cpmrt is on no package index."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cpmrt import installation
from cpmrt.installation import EXTRAS, install_extra, missing_packages, pip_install, reinstall


def raise_not_found(name: str) -> None:
    raise PackageNotFoundError(name)


class Installed:
    """Stand-in for the metadata of an installed cpmrt, whose direct_url.json has the text `origin`."""

    def __init__(self, origin: str | None):
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.origin


def test_a_command_survives_the_shell() -> None:
    parts = shlex.split(pip_install("a>=1", "b[c]"))
    assert parts == [sys.executable, "-m", "pip", "install", "a>=1", "b[c]"]


@pytest.mark.parametrize("extra", ["server", "modelscope", "cuda12", "cuda13"])
def test_an_extra_is_installed_by_its_packages(extra: str) -> None:
    requirements = [Requirement(part) for part in shlex.split(install_extra(extra))[4:]]
    assert requirements and "cpmrt" not in {requirement.name for requirement in requirements}
    if extra in EXTRAS:
        assert {requirement.name.replace("-", "_") for requirement in requirements} >= set(EXTRAS[extra])


def test_without_metadata_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "requires", raise_not_found)
    assert install_extra("server").endswith("'cpmrt[server]'")


@pytest.mark.parametrize(
    "origin, source",
    [
        ('{"url": "file:///a%20b/cpmrt-1-py3-none-any.whl", "archive_info": {}}', ["/a b/cpmrt-1-py3-none-any.whl"]),
        ('{"url": "file:///src/cpmrt", "dir_info": {"editable": true}}', ["--editable", "/src/cpmrt"]),
        (None, ["cpmrt"]),
    ],
)
def test_own_files_come_back_from_where_they_came(
    origin: str | None, source: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "distribution", lambda name: Installed(origin))
    assert shlex.split(reinstall())[4:] == ["--force-reinstall", "--no-deps", *source]


def test_missing_packages_are_found_without_importing_any() -> None:
    code = "import sys; from cpmrt import installation as i; i.missing_packages('server'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert "uvicorn" not in done.stdout.split() and "importlib" in done.stdout.split(), done.stderr


def test_a_package_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "server", ("json", "no_such_package_of_anybody"))
    assert missing_packages("server") == ["no_such_package_of_anybody"]


WITHOUT = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
sys.modules.update(dict.fromkeys(["torch", "transformers", "matplotlib"]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a tool as if these packages were not installed."""


@pytest.mark.parametrize(("tool", "argument", "packages"), [
    ("make_golden.py", "tiny", ["torch", "transformers"]), ("make_demo_model.py", "--help", ["torch"]),
    ("profile_steps.py", "step_begin", ["torch"]), ("plot_performance.py", "", ["matplotlib"]),
])  # fmt: skip
def test_a_tool_says_in_one_line_what_it_needs(tool: str, argument: str, packages: list[str]) -> None:
    path = Path(__file__).parents[2] / "tools" / tool
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(path), argument], capture_output=True, text=True)
    install = shlex.join([sys.executable, "-m", "pip", "install", *packages])
    assert done.stderr == f"{tool} needs {' and '.join(packages)}, not installed here; {install}\n"
    assert done.returncode == 1 and not done.stdout
