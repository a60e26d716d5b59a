"""Python code of README and docs/ runs, with the bundled model in place of hub models; the reference has every
setting."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpmrt import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/index.md", "docs/python.md", "docs/prefixes.md")
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(executor="reference") as llm:
        yield llm


@pytest.mark.all
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(
    block: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.sub(r'LLM\("[\w./-]+"', "LLM(None", block)
    params = SamplingParams(max_new_tokens=8)
    known = {"llm": llm, "params": params, "manual": "import os\n" * 100, "question": "def f("}
    exec(compile(code, "block", "exec"), {**known, "__name__": "__main__"})
    assert capsys.readouterr().out or "print(" not in block


@pytest.mark.parametrize("kind", [LLM, SamplingParams])
def test_the_reference_explains_every_setting(kind: type) -> None:
    text = inspect.getdoc(kind) or ""
    assert [name for name in inspect.signature(kind).parameters if not re.search(rf"`{name}\b", text)] == []
