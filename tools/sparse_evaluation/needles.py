"""Statements hidden in a text at known depths, all of them asked for at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from demo_model.retrieval import CELL, VALUE_WORDS, Mask, Statements, Tokens
from numpy.typing import NDArray

from cpmrt import LLM, SamplingParams
from cpmrt.dtypes import F32

DEPTHS = 10
"""Equal parts of the text, from its beginning to its end."""


@dataclass(frozen=True)
class Haystack:
    """`token_ids` end with the questions and their answers; `answers` [N, VALUE_WORDS] are the positions of these,
    `depths` [N] the part of the text in which each statement is."""

    token_ids: Tokens
    answers: NDArray[np.int64]
    depths: NDArray[np.int64]


def make_haystack(
    text: NDArray[np.integer], statements: Statements, length: int, per_depth: int, bos: int, rng: np.random.Generator
) -> Haystack:
    """`length` tokens in all, `per_depth` statements in each part of the text, the questions in random order.

    Raises ValueError where the text or the length has no room.
    """
    count = DEPTHS * per_depth
    body = length - count * statements.length
    edges = np.linspace(0, (body - 1) // CELL, DEPTHS + 1).astype(int)
    if np.diff(edges).min() < per_depth or len(text) < body:
        raise ValueError(f"{length} tokens have no room for {count} statements, or the text has fewer than {body}")
    start = rng.integers(len(text) - body + 1)
    hidden = np.concatenate([[bos], text[start : start + body - 1]])
    drawn, depths = statements.draw(count, rng), np.repeat(np.arange(DEPTHS), per_depth)
    parts = zip(edges[:-1], edges[1:], strict=True)
    cells = np.concatenate([rng.choice(np.arange(low, high), per_depth, replace=False) for low, high in parts])
    places = 1 + cells * CELL + rng.integers(CELL - statements.length + 1, size=count)
    hidden[places[:, None] + np.arange(statements.length)] = drawn
    order = rng.permutation(count)
    firsts = body + np.arange(count) * statements.length + statements.question_length
    answers = firsts[:, None] + np.arange(VALUE_WORDS)
    return Haystack(np.concatenate([hidden, drawn[order].ravel()]), answers, depths[order])


def logit_chunks(llm: LLM, token_ids: Sequence[int], first: int = 0) -> Iterator[tuple[int, F32]]:
    """(position of the first row, logits [rows, V]) of every position from `first` on, a chunk at a time."""
    ids, start = tuple(map(int, token_ids)), 0
    with llm.engine.borrowed_slot(len(ids)) as (slot, block_table):
        for logits in llm.executor.prompt_logits(slot, ids, block_table):
            if start + len(logits) > first:
                yield max(start, first), logits[max(0, first - start) :]
            start += len(logits)


def found(llm: LLM, haystack: Haystack) -> Mask:
    """Whether greedy decoding answers each question: bool [N], in the order of `haystack.depths`."""
    first = int(haystack.answers.min()) - 1
    choices = np.concatenate([logits.argmax(axis=-1) for _, logits in logit_chunks(llm, haystack.token_ids, first)])
    expected = haystack.token_ids[haystack.answers]
    answered: Mask = (choices[haystack.answers - 1 - first] == expected).all(axis=1)
    return answered


def found_by_decoding(llm: LLM, haystack: Haystack, index: int) -> bool:
    """The same of one question, by generating its answer."""
    first = int(haystack.answers[index, 0])
    params = SamplingParams(max_new_tokens=VALUE_WORDS, ignore_eos=True)
    given = llm.generate(haystack.token_ids[:first].tolist(), params).token_ids
    return list(given) == haystack.token_ids[haystack.answers[index]].tolist()
