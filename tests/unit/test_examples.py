"""The examples run on the bundled model, and show what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from cpmrt import LLM, SamplingParams
from cpmrt.weights.hub import BUNDLED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not part of the wheel")


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs an example and returns its standard output and standard error."""

    def run(name: str, *arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr()

    return run


def greedy(prompt: str, num_tokens: int) -> str:
    with LLM() as llm:
        return llm.generate(prompt, SamplingParams(max_new_tokens=num_tokens, temperature=0)).text


def test_every_example_has_a_test_and_a_line_in_the_readme():
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names and names <= tests
    assert names == set(re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text()))


@pytest.mark.all
@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"tool_calls"}))
def test_every_example_takes_a_model(run, name):
    """Every example runs on the bundled model but tool_calls, which needs a chat template with a place for tools."""
    if name == "server":
        pytest.importorskip("openai")
    out, _ = run(name, str(BUNDLED))
    assert len(out) > 20


def test_generate(run):
    out, err = run("generate")
    assert out.startswith("def read_lines(path):") and len(out) > 60 and "tokens/s" in err


def test_chat(run):
    out, err = run("chat")
    assert out.count("> ") == 2 and len(out.split("\n\n")[1]) > 30
    first, second = [int(line.split()[0]) for line in err.splitlines()]
    assert first == 0 < second


def test_stream(run):
    out, err = run("stream")
    assert out.count("\n") >= 8 and err.strip().startswith("cancelled after")


@pytest.mark.all
def test_threads(run):
    out, _ = run("threads")
    prompts = ("def add(a, b):", "class Stack:", "import json\n", "for line in")
    for prompt, answer in zip(prompts, re.split(r"^--- ", out, flags=re.M)[1:], strict=True):
        assert answer == f"{prompt}{greedy(prompt, 24)}\n"


def test_several_prompts(run):
    out, _ = run("several_prompts")
    answers = re.split(r"^--- ", out, flags=re.M)[1:]
    assert len(answers) == 8 and len(set(answers)) == 8
    assert all(one[:8] == other[:8] for one, other in zip(answers[::2], answers[1::2], strict=True))


@pytest.mark.all
def test_async_requests(run):
    out, _ = run("async_requests")
    streamed, add, stack = out.partition("given up: CancelledError")[0].split("---")
    assert streamed == greedy("for line in", 24)
    assert add == greedy("def add(a, b):", 24) + "\n" and stack == greedy("class Stack:", 24) + "\n"


def test_embeddings(run):
    out, _ = run("embeddings")
    first, *others = [float(line.split()[0]) for line in out.splitlines()]
    assert "return open(path)" in out.splitlines()[0] and len(others) == 2 and 1 > first > max(others)


@pytest.mark.all
def test_draft(run):
    out, _ = run("draft")
    assert float(re.search(r"draft eagle2: .* ([\d.]+) tokens a step", out)[1]) > 1.2


def test_a_draft_of_a_model_that_is_named(run):
    assert "draft lookup: " in run("draft", str(BUNDLED))[0]
    assert "draft eagle3: " in run("draft", str(BUNDLED), "eagle3")[0]
    with pytest.raises(SystemExit):
        run("draft", str(BUNDLED), "eagle3", "more")


@pytest.mark.all
def test_long_context(run):
    out, _ = run("long_context")
    dense, sparse = (float(found) for found in re.findall(r"perplexity ([\d.]+)", out))
    assert dense != sparse and abs(dense - sparse) < 0.1 * dense


def test_tool_calls(run):
    pytest.importorskip("llguidance")
    out, _ = run("tool_calls")
    city = re.match(r"weather\(\{'city': '([^']*)'.*\}\): \1: sunny for \d+ days\n.", out)
    assert city, out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_imports_what_is_public(path):
    """Examples import nothing from cpmrt's inner modules, which may change."""
    assert not re.search(r"^(?:from|import) cpmrt\.", path.read_text(encoding="utf-8"), re.M)


def test_server(run):
    pytest.importorskip("openai")
    out, _ = run("server")
    with LLM() as llm:
        params = SamplingParams(max_new_tokens=32, temperature=0)
        assert out == llm.chat([{"role": "user", "content": "What is a list?"}], params).text + "\n"


def test_a_server_that_does_not_start_says_why(run):
    pytest.importorskip("openai")
    with pytest.raises(SystemExit, match="cpmrt: error: model '/no/such'"):
        run("server", "/no/such")
