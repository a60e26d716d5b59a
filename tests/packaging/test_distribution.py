"""The wheel and the sdist: their files, and a run of the wheel alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cpmrt

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "cpmrt" / "assets" / "demo"
METHODS = ("eagle2", "eagle3")

pytestmark = pytest.mark.all


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this environment's Python with these arguments, and show its output if it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("site")
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target))
    run("-m", "pip", "install", *options, str(wheel), cwd=target)
    return target


def package_files() -> set[str]:
    """Return every file the wheel must hold, relative to the repository root."""
    files = [*(ROOT / "cpmrt").rglob("*.py"), *(path for path in DEMO.rglob("*") if path.is_file())]
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_wheel_holds_all_that_the_program_for_drafts_imports(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "cpmrt" / "tools"
    imported = set()
    for path in [folder / "train_draft.py", *(folder / "draft_training").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("draft_", "demo_")):
                imported.add(node.module.replace(".", "/") + ".py")
    assert len(imported) > 6 and all((folder / name).is_file() for name in imported)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = f"cpmrt-{cpmrt.__version__}.dist-info/"
    assert package_files() <= names
    assert f"{metadata}licenses/LICENSE" in names
    assert not [name for name in names if not name.startswith(("cpmrt/", metadata))]
    assert not [name for name in names if name.endswith((".pyc", ".npz"))]


def test_wheel_is_named_for_the_version_and_fits_any_python(wheel: Path) -> None:
    assert wheel.name == f"cpmrt-{cpmrt.__version__}-py3-none-any.whl"


def test_wheel_holds_a_whole_demo_model(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        demo = [info for info in archive.infolist() if "/demo/" in info.filename]
    sizes = {info.filename.partition("/demo/")[2]: info.file_size for info in demo}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= sizes.keys()
    assert sizes["model.safetensors"] <= 16 * 2**20
    drafts = {name: size for name, size in sizes.items() if "/" in name}
    assert drafts.keys() == {f"{method}/{name}" for method in METHODS for name in ("config.json", "model.safetensors")}
    assert sum(drafts.values()) <= 4_000_000


def test_sdist_holds_what_a_build_and_a_test_run_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    folder = f"cpmrt-{cpmrt.__version__}/"
    with tarfile.open(path) as archive:
        names = {name.removeprefix(folder) for name in archive.getnames()}
    documents = {"LICENSE", "README.md", "CHANGELOG.md", "docs/index.md", "docs/plots/peers.svg", "tools/mkdocs.yml"}
    assert package_files() | documents | {"pyproject.toml", "tools/dev.py", "tests/conftest.py"} <= names
    assert not [name for name in names if ".venv" in name or name.endswith(".pyc")]


def test_the_installed_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    code = "import cpmrt; print(cpmrt.__version__, cpmrt.__file__)"
    version, file = run("-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).stdout.split(maxsplit=1)
    assert version == cpmrt.__version__
    assert Path(file.strip()).is_relative_to(installed)


def test_installed_wheel_prints_help(installed: Path, tmp_path: Path) -> None:
    assert "generate" in run("-m", "cpmrt", "--help", cwd=tmp_path, PYTHONPATH=str(installed)).stdout


def test_installed_wheel_prints_its_version(installed: Path, tmp_path: Path) -> None:
    assert cpmrt.__version__ in run("-m", "cpmrt", "--version", cwd=tmp_path, PYTHONPATH=str(installed)).stdout


def test_installed_wheel_generates_with_the_bundled_model(installed: Path, tmp_path: Path) -> None:
    command = ("-m", "cpmrt", "generate", "def f(", "--max-new-tokens", "4")
    done = run(*command, cwd=tmp_path, PYTHONPATH=str(installed), HF_HUB_OFFLINE="1")
    assert done.stdout.strip()
