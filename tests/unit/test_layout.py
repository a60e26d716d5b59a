"""House rules that a reader of the text alone can check: sizes, names, docstrings and who may import what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base"}
MAX_FILE_LINES = {".py": 400, ".cu": 400, ".cuh": 400}
MAX_FUNCTION_LINES = 60


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the top-level names of all absolute imports anywhere in a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def reads_environment(tree: ast.Module) -> bool:
    """Whether `os.environ` or one of its like is touched."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in names:
                return True
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}:
            return True
    return False


def prints(tree: ast.Module) -> bool:
    """Whether the built-in print is called."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(function, ast.Name) and function.id == "print" for function in calls)


def size_violations(path: str, text: str) -> Iterator[str]:
    """Yield the broken rules that hold for every source file, kernels too."""
    limit, lines = MAX_FILE_LINES[Path(path).suffix], len(text.splitlines())
    if lines > limit:
        yield f"{path}: {lines} lines, the limit is {limit}"
    for part in Path(path).with_suffix("").parts:
        for word in FORBIDDEN_NAMES & set(part.lower().split("_")):
            yield f"{path}: '{word}' in a file name says nothing"


def python_violations(path: str, text: str) -> Iterator[str]:
    """Yield the broken rules for Python under cpmrt/ and tools/; `path` is relative to the repository root."""
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield f"{path}: no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, the limit is {MAX_FUNCTION_LINES}"
    if not path.startswith("cpmrt/"):
        return
    if path != "cpmrt/env.py" and reads_environment(tree):
        yield f"{path}: environment variables are read in cpmrt/env.py only"
    if "torch" in imported_modules(tree):
        yield f"{path}: torch has no place in cpmrt/"
    if "cupy" in imported_modules(tree) and not path.startswith("cpmrt/cuda/"):
        yield f"{path}: cupy is imported in cpmrt/cuda/ only"
    if prints(tree) and not path.startswith("cpmrt/cli/"):
        yield f"{path}: print() belongs to cpmrt/cli/"


def violations(path: str, text: str) -> list[str]:
    """Return every rule that one file breaks."""
    return [*size_violations(path, text), *(python_violations(path, text) if path.endswith(".py") else ())]


def source_files() -> list[Path]:
    """Return the Python files of cpmrt/ and tools/ and the CUDA files of kernels_cu/."""
    patterns = ("cpmrt/**/*.py", "tools/**/*.py", "kernels_cu/**/*.cu", "kernels_cu/**/*.cuh")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def test_sources_are_found() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in source_files()}
    assert {"cpmrt/env.py", "cpmrt/config/sampling.py", "tools/dev.py"} <= names


def test_every_source_file_keeps_the_rules() -> None:
    broken = [
        problem
        for path in source_files()
        for problem in violations(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


def test_no_test_package_markers() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py")), "tests are imported with importlib, not as packages"


LONG_FUNCTION = '"""m."""\ndef f():\n' + "    x = 1\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("cpmrt/a.py", "x = 1\n", "no module docstring"),
        ("cpmrt/a.py", '"""m."""\n' * 401, "401 lines, the limit is 400"),
        ("kernels_cu/gemm.cu", "//\n" * 401, "401 lines, the limit is 400"),
        ("cpmrt/a.py", LONG_FUNCTION, "f has 61 lines"),
        ("cpmrt/text_utils.py", '"""m."""\n', "'utils'"),
        ("tools/common/a.py", '"""m."""\n', "'common'"),
        ("cpmrt/a.py", '"""m."""\nimport os\nx = os.environ["A"]\n', "environment"),
        ("cpmrt/a.py", '"""m."""\nimport os\nx = os.getenv("A")\n', "environment"),
        ("cpmrt/a.py", '"""m."""\nfrom os import environ\n', "environment"),
        ("cpmrt/cuda/a.py", '"""m."""\nimport torch.nn\n', "torch"),
        ("cpmrt/llm.py", '"""m."""\ndef f():\n    from cupy import cuda\n', "cupy"),
        ("cpmrt/llm.py", '"""m."""\nprint(1)\n', "print()"),
    ],
)
def test_each_rule_can_fail(path: str, text: str, expected: str) -> None:
    found = violations(path, text)
    assert len(found) == 1 and expected in found[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cpmrt/env.py", '"""m."""\nimport os\nx = os.environ["A"]\n'),
        ("cpmrt/cuda/a.py", '"""m."""\nimport cupy\n'),
        ("cpmrt/cli/a.py", '"""m."""\nprint(1)\n'),
        ("tools/a.py", '"""m."""\nimport torch, os\nprint(os.environ)\n'),
        ("cpmrt/baseline.py", '"""m."""\nfrom .torch import x\n'),
        ("kernels_cu/gemm.cu", "//\n" * 400),
    ],
)
def test_what_the_rules_allow(path: str, text: str) -> None:
    assert violations(path, text) == []
