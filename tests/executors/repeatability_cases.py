"""Prompts whose keys, values and logits must have the same bits however they are cut, reused and accompanied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cpmrt import LLM, SamplingParams
from cpmrt.executor import TokenLogprobs

Answer = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]
Open = Callable[..., LLM]
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.8, seed=5, logprobs=2, ignore_eos=True)


def text(num_tokens: int, seed: int, vocab: int) -> list[int]:
    """Return random tokens."""
    ids: list[int] = np.random.default_rng(seed).integers(1, vocab, num_tokens).tolist()
    return ids


def answer(llm: LLM, prompt: Sequence[int], params: SamplingParams = SAMPLED) -> Answer:
    """Return the tokens of an answer and their log-probabilities."""
    out = llm.generate(prompt, params)
    return out.token_ids, out.logprobs


def logits_of(open_llm: Open, prompt: Sequence[int], **settings: Any) -> np.ndarray[Any, Any]:
    with open_llm(**settings) as llm:
        return llm.logits(prompt)


def reused_answers(open_llm: Open, prompt: Sequence[int], depths: Sequence[int], **settings: Any) -> list[Answer]:
    """Return an answer for each depth, with so many tokens of the prompt in a cache that was empty before."""
    answers = []
    for depth in depths:
        with open_llm(**settings) as llm:
            if depth:
                llm.generate([*prompt[:depth], 1], SamplingParams(max_new_tokens=1))
            out = llm.generate(prompt, SAMPLED)
            assert out.stats.cached_tokens == depth // 64 * 64
            answers.append((out.token_ids, out.logprobs))
    return answers


def pages_of(llm: LLM, prompt: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Compute a prompt and return what its full pages hold, with undefined entries set to zero."""
    llm.generate(prompt, SamplingParams(max_new_tokens=1, temperature=0))
    full = len(prompt) // 64 * 64
    cache = llm.engine.cache
    assert cache is not None
    held = cache.acquire((*prompt[:full], 0), full)
    assert held.num_cached == full
    pages = {name: np.array(array) for name, array in llm.executor.read_pages(held.table).items()}
    cache.release(held)
    clear_undefined(pages)
    return pages


def clear_undefined(pages: dict[str, np.ndarray[Any, Any]]) -> None:
    """Clear the entries that a prefix does not determine.

    An EAGLE draft's row at the last token depends on the next token; the first windows of compressed keys would begin
    before the text.
    """
    for name, array in pages.items():
        if name.startswith("draft."):
            array[:, -1, :, -1] = 0
        elif name == "k1_pages":
            array[:, 0, :, 0] = 0
        elif name == "k2_pages":
            array[:, 0] = 0


def equal_pages(one: dict[str, np.ndarray[Any, Any]], other: dict[str, np.ndarray[Any, Any]]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def accompanied(
    open_llm: Open, prompts: Sequence[Sequence[int]], params: SamplingParams = SAMPLED, **settings: Any
) -> list[Answer]:
    """Return the answers of prompts that run together."""
    with open_llm(max_sequences=len(prompts), **settings) as llm:
        outs = [stream.finish() for stream in [llm.stream(prompt, params) for prompt in prompts]]
    return [(out.token_ids, out.logprobs) for out in outs]
