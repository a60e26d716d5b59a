"""Conversations whose prompts share beginnings, to ask a model with and without the prefix cache."""

from __future__ import annotations

from typing import Any

from cpmrt import LLM, SamplingParams
from cpmrt.executor import Prefill, Step
from cpmrt.generation import Completion

GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
PENALISED = SamplingParams(
    max_new_tokens=40, temperature=0.8, seed=3, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3,
    ignore_eos=True,
)  # fmt: skip
START = [5 + i * i % 89 for i in range(90)]


def branching(llm: LLM) -> list[Completion]:
    """Return the answers of seven prompts that share beginnings.

    They are a first turn, two continuations of its answer, one of half of it, the first turn again, a text that begins
    otherwise, and a third turn.
    """
    outs = [llm.generate(START, GREEDY)]
    answered = [*START, *outs[0].token_ids]
    outs.append(llm.generate([*answered, 40, 41, 42], SAMPLED))
    outs.append(llm.generate([*answered, 50], PENALISED))
    outs.append(llm.generate([*answered[:100], *range(20, 60)], PENALISED))
    outs.append(llm.generate(START, SAMPLED))
    outs.append(llm.generate([9, *START], GREEDY))
    outs.append(llm.generate([*answered, 40, 41, 42, *outs[1].token_ids, 60], GREEDY))
    return outs


def texts(outs: list[Completion]) -> list[tuple[int, ...]]:
    return [out.token_ids for out in outs]


def cached(outs: list[Completion]) -> list[int]:
    return [out.stats.cached_tokens for out in outs]


def num_prefilled(log: list[tuple[Step, Any]]) -> int:
    return sum(len(step.token_ids) for step, _ in log if isinstance(step, Prefill))


BRANCHING_CACHED = [0, 64, 128, 64, 64, 0, 128]
"""Cached tokens of each answer of `branching`: whole pages of 64, without the prompt's last token."""
BRANCHING_CACHED_FAST = [0, 128, 128, 64, 64, 0, 128]
"""Cached tokens of each answer of `branching` if pages of answers are kept too."""
