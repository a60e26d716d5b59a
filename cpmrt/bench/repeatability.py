"""Checks whether the same request gives the same answer: asks prompts again, alone and together with others."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from cpmrt.config import SamplingParams
from cpmrt.job_maker import Prompt
from cpmrt.llm import LLM

TEMPERATURES = (0.0, 0.8)
_NEW_TOKENS = 64
_CHARACTERS = (300, 1200)
_RANDOM_TOKENS = (100, 400)
"""The least and the greatest length of prompts: in characters, for pieces of Python's argparse.py, or in tokens, where
there is no tokenizer."""


@dataclass(frozen=True)
class Differing:
    """How many answers differ from the first ones to the same prompts: asked `again` alone, and all `together`."""

    temperature: float
    again: int
    together: int


def ask_again(llm: LLM, num_prompts: int, temperature: float) -> Differing:
    """Ask each prompt twice in a row, then all of them at once, as many together as the model takes.

    Every prompt has a seed of its own. Prompts that begin alike and evicted pages need no extra cases: they come about
    by themselves.
    """
    prompts = _prompts(llm, num_prompts)
    params = [SamplingParams(_NEW_TOKENS, temperature=temperature, seed=seed) for seed in range(num_prompts)]
    first, again = [], []
    for prompt, wishes in zip(prompts, params, strict=True):
        first.append(llm.generate(prompt, wishes).token_ids)
        again.append(llm.generate(prompt, wishes).token_ids)
    streams = [llm.stream(prompt, wishes) for prompt, wishes in zip(prompts, params, strict=True)]
    together = [stream.finish().token_ids for stream in streams]
    return Differing(temperature, _differing(first, again), _differing(first, together))


def _differing(first: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> int:
    return sum(one != two for one, two in zip(first, other, strict=True))


def _prompts(llm: LLM, count: int) -> list[Prompt]:
    draw = random.Random(1)
    if llm.tokenizer is None:
        vocab = range(llm.config.vocab_size)
        return [draw.choices(vocab, k=draw.randint(*_RANDOM_TOKENS)) for _ in range(count)]
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    pieces = list[Prompt]()
    for _ in range(count):
        length = draw.randint(*_CHARACTERS)
        begin = draw.randrange(len(source) - length)
        pieces.append(source[begin : begin + length])
    return pieces
