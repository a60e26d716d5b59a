"""Types of the public API: a program that uses it passes mypy --strict, and each mistake fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = '''
import asyncio
from collections.abc import Sequence

import numpy as np

import cpmrt
from cpmrt import LLM, AsyncLLM, Call, Completion, CpmrtError, Piece, RequestError, SamplingParams, TextStream


def show(answer: Completion) -> str:
    choices: tuple[Completion, ...] = answer.choices
    calls: tuple[Call, ...] = answer.tool_calls
    for call in calls:
        name: str = call.name
        print(name, call.arguments.strip())
    return f"{answer.text} {answer.finish_reason} {answer.stats.decode_tokens_per_s:.1f} {len(choices)}"


def blocking(prompts: list[str], ids: Sequence[int]) -> list[str]:
    params = SamplingParams(max_new_tokens=8, temperature=0.8, stop=["x"], logit_bias={3: -1.0}, n=2)
    with LLM("model", executor="reference", memory_budget="8GiB", max_sequences=4) as llm:
        one: Completion = llm.generate("text", params)
        other: Completion = llm.generate(ids)
        many: list[Completion] = llm.generate(prompts, [params] * len(prompts), progress=True)
        more: list[Completion] = llm.generate([[1, 2], [3]])
        array: Completion = llm.generate(np.array([1, 2]))
        chat: Completion = llm.chat([{"role": "user", "content": "hi"}], enable_thinking=False)
        chats: list[Completion] = llm.chat([[{"role": "user", "content": "hi"}]], template_kwargs={"mood": 1})
        stream: TextStream = llm.stream("text")
        for piece in stream:
            text: str = piece.text
            print(text)
        score: float = float(llm.score("text").mean()) + float(llm.embed(["a"], pooling="last")[0, 0])
        print(score, llm.plan, llm.max_context, stream.completion.text, cpmrt.__version__)
        return [show(answer) for answer in (one, other, array, chat, *many, *more, *chats)]


async def waiting(llm: AsyncLLM) -> list[Piece]:
    answer: Completion = await llm.generate("text")
    many: list[Completion] = await llm.generate(["a", "b"])
    print(answer.text, many, await llm.score("text"))
    async with llm.stream("text") as stream:
        return [piece async for piece in stream]


try:
    blocking(["a"], [1])
    asyncio.run(waiting(AsyncLLM(LLM())))
except RequestError as error:
    print(error.what, error.fix)
except CpmrtError as error:
    print(error)
'''
BAD = (
    'llm.generate("text", temperature=1.0)',
    'llm.generate("text", {"temperature": 1.0})',
    'answers: list[Completion] = llm.generate("text")',
    'answer: Completion = llm.generate(["text"])',
    'llm.chat("hi")',
    "llm.chat([], enable_thinkin=True)",
    'llm.embed("a", pooling="max")',
    'llm.stream(["a"])',
    "llm.score(1.5)",
    "LLM(5)",
    "LLM(max_model_len=5)",
    'SamplingParams(temperature="hot")',
    "SamplingParams(max_tokens=5)",
    'llm.generate("text").txt',
    "cpmrt.Llama",
    'AsyncLLM("model")',
)


def checked(tmp_path: Path, program: str) -> list[str]:
    """Return the lines of mypy --strict on a program that uses the package as it is installed."""
    (tmp_path / "program.py").write_text(program)
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-error-codes", "program.py"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "user"), "--follow-imports", "silent"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"MYPYPATH": str(ROOT)})
    return done.stdout.splitlines()


def test_a_program_that_uses_everything_is_well_typed(tmp_path: Path) -> None:
    assert (ROOT / "cpmrt" / "py.typed").is_file()
    assert checked(tmp_path, GOOD) == []


def test_each_mistake_is_an_error_on_its_line(tmp_path: Path) -> None:
    head = ["import cpmrt", "from cpmrt import LLM, AsyncLLM, Completion, SamplingParams", "llm = LLM()", ""]
    errors = checked(tmp_path, "\n".join([*head, *BAD]))
    for line, mistake in enumerate(BAD, len(head) + 1):
        assert any(error.startswith(f"program.py:{line}: error") for error in errors), mistake
