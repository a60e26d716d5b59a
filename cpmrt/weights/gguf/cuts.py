"""Finds where tokens may be cut into two other tokens, thousands of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
_BASE = 0x9E3779B97F4A7C15
"""An odd number, so that it has an inverse among the integers modulo 2**64."""
_BATCH = 1 << 13
"""Tokens that are hashed at a time: the arrays for their characters take a few MB."""


def likely_cuts(tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield (token, length of its first part) for each cut of a token into two parts that both have a token's hash.

    Every cut into two of the `tokens` is yielded; another one only where two hashes collide, which hardly happens.
    """
    batches = [tokens[begin : begin + _BATCH] for begin in range(0, len(tokens), _BATCH)]
    known = np.unique(np.concatenate([_Hashes(batch).of_tokens() for batch in batches])) if batches else None
    for batch in batches:
        assert known is not None
        yield from _likely_cuts(batch, known)


def _likely_cuts(tokens: Sequence[str], known: U64) -> Iterator[tuple[str, int]]:
    hashes = _Hashes(tokens)
    cuts = np.maximum(hashes.ends - hashes.begins - 1, 0)
    number = np.repeat(np.arange(len(tokens)), cuts)
    length = np.arange(len(number)) - np.repeat(np.cumsum(cuts) - cuts, cuts) + 1
    for is_second in (False, True):
        begin, end = hashes.begins[number], hashes.ends[number]
        border = begin + length
        part = hashes.of(border, end) if is_second else hashes.of(begin, border)
        place = np.minimum(np.searchsorted(known, part), len(known) - 1)
        kept = known[place] == part
        number, length = number[kept], length[kept]
    yield from ((tokens[index], cut) for index, cut in zip(number.tolist(), length.tolist(), strict=True))


class _Hashes:
    """Hashes of any parts of some tokens, which are concatenated: token i is characters `begins[i]` to `ends[i]`.

    A hash is a polynomial in `_BASE`, modulo 2**64, whose coefficients are the characters. That of any part is the
    difference of two prefix sums, divided by a power of `_BASE`.
    """

    def __init__(self, tokens: Sequence[str]):
        self.ends: I64 = np.cumsum(np.array([len(token) for token in tokens], np.int64))
        self.begins: I64 = np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])
        characters = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32)
        powers, self._inverses = (_powers(base, len(characters)) for base in (_BASE, pow(_BASE, -1, 1 << 64)))
        terms = (characters.astype(np.uint64) + np.uint64(1)) * powers[:-1]
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])

    def of(self, begins: I64, ends: I64) -> U64:
        """Return the hashes of the parts from characters `begins` to `ends`."""
        found: U64 = (self._sums[ends] - self._sums[begins]) * self._inverses[begins]
        return found

    def of_tokens(self) -> U64:
        """Return the hashes of whole tokens."""
        return self.of(self.begins, self.ends)


def _powers(base: int, count: int) -> U64:
    """Return the powers 0 to `count` of a number modulo 2**64."""
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    found: U64 = np.multiply.accumulate(factors)
    return found
