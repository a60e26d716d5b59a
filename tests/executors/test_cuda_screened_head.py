"""A screened head on a GPU gives the tokens of the whole head: greedy, sampled, alone, together, in every graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cpmrt import LLM, SamplingParams
from cpmrt.bench.shapes import shape_folder

pytestmark = pytest.mark.gpu
PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def push(self", "import os\n\n\ndef walk(", "x = [1, 2, 3]\n")
WISHES = [
    {},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3},
    {"temperature": 1.1, "min_p": 0.05, "seed": 4},
    {"temperature": 0.7, "top_k": 8, "min_p": 0.1, "seed": 5},
]
OTHERS = [
    {"temperature": 1.0, "seed": 6},
    {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    {"repetition_penalty": 1.2},
    {"logprobs": 3},
    {"logit_bias": {5: 2.0}},
    {"regex": "[a-z ]{20,40}"},
]
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {}, "fp16": {"dtype": "float16"}, "loops": {"steps_per_launch": 8}, "eager": {"cuda_graphs": False},
    "lookup": {"draft": "lookup"}, "fp8": {"kv_dtype": "fp8"}, "many": {"max_sequences": 32},
    "eagle2": {"draft": "eagle2"}, "trees": {"draft": "eagle2", "speculate": {"adaptive": False}},
    "looping trees": {
        "draft": "eagle2", "speculate": {"shapes": [(2, 4, 12)], "adaptive": False}, "steps_per_launch": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def pair(request: Any) -> Iterator[tuple[LLM, LLM]]:
    settings = {"executor": "cuda", "max_sequences": 8} | request.param
    with LLM(**settings, lm_head_screen=False) as plain, LLM(**settings, lm_head_screen=True) as screened:
        yield plain, screened


def tokens(llm: LLM, count: int, wishes: list[dict[str, Any]], prompts: tuple[str, ...] = PROMPTS) -> list[Any]:
    every = [(prompt, wish) for prompt in prompts for wish in wishes]
    params = [SamplingParams(max_new_tokens=count, ignore_eos="regex" not in wish, **wish) for _, wish in every]
    found = llm.generate([prompt for prompt, _ in every], params)
    return [(answer.token_ids, answer.logprobs) for answer in found]


def test_tokens_are_those_of_the_whole_head(pair: tuple[LLM, LLM]) -> None:
    plain, screened = pair
    prompts = PROMPTS * max(plain.executor.limits.max_sequences // 16, 1)
    assert tokens(screened, 640, WISHES, prompts) == tokens(plain, 640, WISHES, prompts)
    for prompt in PROMPTS[:2]:  # alone: steps of one row
        assert tokens(screened, 250, WISHES[:2], (prompt,)) == tokens(plain, 250, WISHES[:2], (prompt,))


def test_a_head_is_screened_unless_the_memory_is_small() -> None:
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    for settings, count in (({}, 8), ({"lm_head_screen": False}, 0), ({"memory_budget": "64MiB"}, 0)):
        with LLM(executor="cuda", max_context=256, **settings) as llm:
            assert llm.generate(PROMPTS[0], params).stats.screened_steps == count


def test_requests_that_need_all_logits_beside_others(pair: tuple[LLM, LLM]) -> None:
    plain, screened = pair
    mixed = [*OTHERS, *WISHES]
    assert tokens(screened, 40, mixed, PROMPTS[:1]) == tokens(plain, 40, mixed, PROMPTS[:1])


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_every_step_is_screened(pair: tuple[LLM, LLM], wish: dict[str, Any]) -> None:
    """Every step is screened, also those with a tree, whatever they accept."""
    plain, screened = pair
    params = SamplingParams(max_new_tokens=100, ignore_eos=True, **wish)
    stats = screened.generate(PROMPTS[1], params).stats
    assert stats.screened_steps == 99 - stats.speculative_tokens + stats.speculative_steps
    assert plain.generate(PROMPTS[1], params).stats.screened_steps == 0


@pytest.mark.parametrize("shape", ["minicpm4-0.5b"])
def test_random_weights(shape: str) -> None:
    """Tokens are the same with random weights, whose logits are close to each other and give many candidates."""
    with shape_folder(shape, {}) as folder:
        settings: dict[str, Any] = {"executor": "cuda", "load_format": "dummy", "max_context": 4096}
        answers = []
        for screen in (False, True):
            with LLM(folder, **settings, lm_head_screen=screen) as llm:
                params = [SamplingParams(max_new_tokens=2500, ignore_eos=True, **wish) for wish in WISHES[:2]]
                answers.append([llm.generate([5, 6, 7], wish).token_ids for wish in params])
        assert answers[0] == answers[1]
