"""Makes long held-out texts with statements hidden at known depths and asked for at the end, and measures answers.

The text consists of documents of the installed packages that the demo model was not trained on, end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from demo_model.corpus import Source, installed_packages, is_held_out, is_wanted, read_document, standard_library
from demo_model.retrieval import CELL, VALUE_WORDS, Mask, Statements, Tokens
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cpmrt import LLM, SamplingParams
from cpmrt.dtypes import F32
from cpmrt.engine.loan import borrowed_slot

DEPTHS = 10
"""The number of equal parts into which a text is divided from its beginning to its end."""


@dataclass(frozen=True)
class HeldOutText:
    """The tokens of a text, each document between <s> (`bos`) and </s>; `provenance` says which documents it has."""

    token_ids: Tokens
    bos: int
    provenance: str

    def windows(self, count: int, length: int) -> list[Tokens]:
        """Returns at most `count` pieces of `length` tokens from all over the text, <s> first, without overlaps."""
        available = len(self.token_ids) // (length - 1)
        starts = np.linspace(0, available - 1, min(count, available)).astype(int) * (length - 1)
        return [np.concatenate([[self.bos], self.token_ids[start : start + length - 1]]) for start in starts]


def held_out_text(tokenizer: Tokenizer, bos: int, eos: int) -> HeldOutText:
    """Collects the documents that training left out. It chose by path alone, so any version of a package will do."""
    packages, _ = installed_packages()
    pieces: list[np.ndarray] = []
    names: set[str] = set()
    for source in (standard_library(), *packages):
        texts = _documents(source)
        names |= {source.name} if texts else set()
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        pieces += [np.array([bos, *encoding.ids, eos], np.int64) for encoding in encodings]
    provenance = f"{len(pieces)} documents of {len(names)} packages that training left out"
    return HeldOutText(np.concatenate(pieces), bos, provenance)


def _documents(source: Source) -> list[str]:
    wanted = (path for path in source.paths if is_wanted(Path(path)) and is_held_out(f"{source.name}/{path}"))
    texts = (read_document(str(Path(source.root, path))) for path in wanted)
    return [text for text in texts if text is not None]


@dataclass(frozen=True)
class Haystack:
    """A text with hidden statements, which ends with the questions and their answers.

    `answers` [N, VALUE_WORDS] are the positions of the answers' tokens, `depths` [N] the part of the text that has each
    statement.
    """

    token_ids: Tokens
    answers: NDArray[np.int64]
    depths: NDArray[np.int64]


def make_haystack(
    text: NDArray[np.integer], statements: Statements, length: int, per_depth: int, bos: int, rng: np.random.Generator
) -> Haystack:
    """Makes a haystack of `length` tokens, `per_depth` statements in each part, the questions in random order.

    Raises ValueError if the length has no room for them, or the text is too short.
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
    """Yields (first position, logits [rows, V]) for all positions from `first` on, a chunk at a time."""
    ids, start = tuple(map(int, token_ids)), 0
    with borrowed_slot(llm.engine, len(ids)) as (slot, block_table):
        for logits in llm.executor.prompt_logits(slot, ids, block_table):
            if start + len(logits) > first:
                yield max(start, first), logits[max(0, first - start) :]
            start += len(logits)


def found(llm: LLM, haystack: Haystack) -> Mask:
    """Tells for each question whether greedy decoding answers it: bool [N], in the order of `haystack.depths`."""
    first = int(haystack.answers.min()) - 1
    choices = np.concatenate([logits.argmax(axis=-1) for _, logits in logit_chunks(llm, haystack.token_ids, first)])
    expected = haystack.token_ids[haystack.answers]
    answered: Mask = (choices[haystack.answers - 1 - first] == expected).all(axis=1)
    return answered


def found_by_decoding(llm: LLM, haystack: Haystack, index: int) -> bool:
    """Tells whether the question `index` is answered right, by generating its answer."""
    first = int(haystack.answers[index, 0])
    params = SamplingParams(max_new_tokens=VALUE_WORDS, temperature=0.0, ignore_eos=True)
    given = llm.generate(haystack.token_ids[:first].tolist(), params).token_ids
    return list(given) == haystack.token_ids[haystack.answers[index]].tolist()
