"""Closed thoughts and loops on a GPU: with every draft, and beside others, the tokens of plain decoding."""

from __future__ import annotations

import pytest

from cpmrt import LLM, SamplingParams

PROMPTS = ("# Think first.\n<think>\n", "x = [1, 2, 3]\nprint(x)\n", "def read_lines(path):\n<think>")
CLOSED = SamplingParams(max_new_tokens=90, max_thinking_tokens=37, logprobs=2, ignore_eos=True)
WISHES = [
    CLOSED,
    SamplingParams(
        max_new_tokens=120, max_thinking_tokens=64, temperature=0.8, seed=3, repetition_penalty=1.1, ignore_eos=True
    ),
    SamplingParams(max_new_tokens=700, loop_repeats=3, ignore_eos=True),
    SamplingParams(max_new_tokens=700, loop_repeats=3, loop_penalty=1.3, max_thinking_tokens=200, ignore_eos=True),
]


def outcomes(llm: LLM):
    return [
        (answer.token_ids, answer.logprobs, answer.finish_reason)
        for prompt in PROMPTS
        for answer in (llm.generate(prompt, params) for params in WISHES)
    ]


@pytest.fixture(scope="module")
def plain():
    with LLM(executor="cuda", prefill_chunk=64) as llm:
        return outcomes(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [
    {"draft": "lookup"}, {"draft": "eagle2"}, {"draft": "eagle3", "speculate": {"adaptive": False}},
    {"steps_per_launch": 8}, {"prefix_cache": False},
], ids=str)  # fmt: skip
def test_how_the_steps_are_made_does_not_matter(plain, settings):
    with LLM(executor="cuda", prefill_chunk=64, **settings) as llm:
        assert outcomes(llm) == plain
        streams = [llm.stream(prompt, params) for prompt in PROMPTS for params in WISHES]
        assert [stream.finish().token_ids for stream in streams] == [tokens for tokens, *_ in plain]


@pytest.mark.gpu
def test_sequences_beside_each_other(plain):
    with LLM(executor="cuda", prefill_chunk=64, max_sequences=8) as llm:
        streams = [llm.stream(prompt, params) for prompt in PROMPTS for params in WISHES]
        assert [stream.finish().token_ids for stream in streams] == [tokens for tokens, *_ in plain]


@pytest.mark.gpu
def test_the_marker_is_there_and_loops_end(plain):
    with LLM(executor="cuda") as llm:
        closing = tuple(llm.tokenizer.encode(".\n</think>\n\n", add_special_tokens=False)[1:])
        assert plain[0][0][37 : 37 + len(closing)] == closing
        assert "loop" in {reason for _, _, reason in plain}
