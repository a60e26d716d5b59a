"""Makes texts with hidden statements and later questions about them, with which the long demo model learns retrieval.

A statement is a line `# key key -> value value value` of whole-word tokens drawn at random. A question is the beginning
of a statement up to the arrow, and its answer is the values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo_model.tokenizer import BOS_ID, SPACE_MARK

Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]

KEY_WORDS, VALUE_WORDS = 2, 3
OPENING, ARROW = "\n#", " ->"
WORD = re.compile(rf"{SPACE_MARK}[a-z]{{3,}}")
CELL = 32
"""Tokens of a cell. A text is cut into cells with at most one statement each, so that statements never touch."""
TOKENS_PER_PAIR = 128
JUMPS = 6


@dataclass(frozen=True)
class Statements:
    """The tokens that statements are made of."""

    opening: tuple[int, ...]
    arrow: int
    words: Tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Statements:
        """Finds the tokens in a tokenizer. Raises ValueError if too few words, or not the arrow, are single tokens."""
        opening = tokenizer.encode(OPENING, add_special_tokens=False).ids
        arrow = tokenizer.encode(ARROW, add_special_tokens=False).ids
        words = sorted(token for piece, token in tokenizer.get_vocab().items() if WORD.fullmatch(piece))
        if len(arrow) != 1 or len(words) < 2 * VALUE_WORDS:
            raise ValueError(f"the tokenizer has {len(words)} whole words and {ARROW!r} in {len(arrow)} tokens")
        return cls(tuple(opening), arrow[0], np.array(words))

    @property
    def length(self) -> int:
        """The number of tokens of a statement."""
        return self.question_length + VALUE_WORDS

    @property
    def question_length(self) -> int:
        """The number of tokens up to the arrow."""
        return len(self.opening) + KEY_WORDS + 1

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draws statements [count, length], no two of them with the same key."""
        num_words = len(self.words)
        codes = rng.choice(num_words**KEY_WORDS, count, replace=False)
        keys = codes[:, None] // num_words ** np.arange(KEY_WORDS) % num_words
        values = rng.integers(num_words, size=(count, VALUE_WORDS))
        fixed = np.tile(self.opening, (count, 1)), np.full((count, 1), self.arrow)
        return np.concatenate([fixed[0], self.words[keys], fixed[1], self.words[values]], axis=1)


@dataclass(frozen=True)
class RetrievalRows:
    """Rows of text in which each statement stands twice: tokens [R, L + 1], <s> first.

    The masks are over the L targets of each row: `is_answer` marks the values of each statement's second copy,
    `is_text` the tokens outside of statements.
    """

    tokens: Tokens
    is_text: Mask
    is_answer: Mask


def retrieval_rows(
    text: NDArray[np.integer], statements: Statements, count: int, length: int, rng: np.random.Generator
) -> RetrievalRows:
    """Returns `count` random pieces of a text, in which half of the cells hold a statement or its second copy.

    There is one such pair for every TOKENS_PER_PAIR tokens.
    """
    starts = rng.integers(len(text) - length, size=(count, 1))
    tokens = np.concatenate([np.full((count, 1), BOS_ID), text[starts + np.arange(length)]], axis=1)
    num_pairs = length // TOKENS_PER_PAIR
    drawn = np.stack([statements.draw(num_pairs, rng) for _ in range(count)])
    cells = np.sort(rng.random((count, length // CELL)).argsort(axis=1)[:, : 2 * num_pairs].reshape(count, -1, 2))
    offsets = rng.integers(1, CELL - statements.length + 1, size=cells.shape)
    rows = np.arange(count)[:, None, None]
    is_statement, is_answer = (np.zeros((count, length + 1), bool) for _ in range(2))
    for turn in range(2):
        places = (cells * CELL + offsets)[:, :, turn, None] + np.arange(statements.length)
        tokens[rows, places] = drawn
        is_statement[rows, places] = True
    is_answer[rows, places[:, :, statements.question_length :]] = True
    return RetrievalRows(tokens, ~is_statement[:, 1:], is_answer[:, 1:])


def spread_positions(length: int, reach: int, rng: np.random.Generator) -> Tokens:
    """Returns `length` rising positions below `reach`, consecutive except for JUMPS jumps, so that short rows teach
    long distances (as in PoSE, arXiv 2309.10400)."""
    steps = np.zeros(length, np.int64)
    room = int(rng.integers(reach - length + 1))
    np.add.at(steps, rng.integers(length, size=JUMPS), rng.multinomial(room, rng.dirichlet(np.ones(JUMPS))))
    return np.arange(length) + np.cumsum(steps)
