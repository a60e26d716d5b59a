"""tools/eval_forms.py on the bundled model: every figure is printed, and a tool call saves steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.all


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import eval_forms

    return eval_forms


def test_every_figure_is_printed(tool, capsys):
    assert tool.main(["--executor", "reference", "--tokens", "4"]) == 0
    ready, first, saved, *rates = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"ready after [\d.]+ s", ready)
    assert re.fullmatch(r"first mask of 300 schemas, 4096 tokens: median [\d.]+ ms, 90 % within [\d.]+", first)
    assert int(re.search(r"(\d+)% of the steps saved", saved)[1]) >= 25
    assert [re.search(r", (\w+): [\d.]+ tok/s", line)[1] for line in rates] == ["free", "text", "schema"]
    assert re.search(r"; [\d.]+ tokens and [\d.]+ ms a step$", rates[0])


def test_drafts_are_timed_by_the_step(tool, capsys):
    assert tool.main(["--executor", "reference", "--tokens", "4", "--draft", "lookup"]) == 0
    _, *rates = capsys.readouterr().out.splitlines()
    assert [re.search(r", (\w+): [\d.]+ steps/s", line)[1] for line in rates] == ["free", "any", "text", "strings"]


def test_the_draft_of_the_bundled_model_drafts_one_tree(tool, capsys):
    forms = ["--forms", "free", "text"]
    assert tool.main(["--executor", "reference", "--tokens", "4", "--draft", "eagle2", "--repeats", "1", *forms]) == 0
    assert " of free; " in capsys.readouterr().out.splitlines()[2]


def test_a_simulation_wants_a_gpu(tool, capsys):
    line = ["--executor", "reference", "--draft", "lookup", "--simulate-accept", "2"]
    assert tool.main(line) == 2
    said = "simulate_accept needs a GPU: the NumPy executor accepts what the draft is worth; leave it out"
    assert said in capsys.readouterr().err


def test_a_shape_wants_its_tokenizer(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--shape", "minicpm4-0.5b"])
    assert "--tokenizer" in capsys.readouterr().err
