"""Follows one answer through its form: a thought first, where there may be one, then the grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpmrt.errors import FormError

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True)
class Thought:
    """How an answer may begin with a thought.

    `closing`: the bytes that end a thought which the prompt has opened. `openings`: the single tokens that may begin
    one, with the bytes that end it.
    """

    closing: bytes = b""
    openings: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """What a matcher knows of tokens: the bytes of each, the tokens of bytes, and the bits of all but end tokens."""

    bytes_of: Callable[[int], bytes]
    tokens_of: Callable[[bytes], list[int]]
    not_ends: bytes


class AnswerMatcher:
    """Tells the engine which tokens may come next in one answer: an `engine.guide.Matcher`.

    `matcher` is the grammar's, which no other answer uses and which has taken in no token yet.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, thought: Thought):
        self._matcher, self._vocabulary = matcher, vocabulary
        self._closing, self._openings = thought.closing, dict(thought.openings)
        """`_closing`: what ends the thought that is open, b"" if none is. `_openings`: empty behind the first token."""
        self._held = b""
        """The end of the thought so far, where its marker may have begun."""
        self._in_gap = False
        """Whether nothing but a thought, and white space that the grammar does not take, has come."""

    def allowed(self) -> bytes:
        """Return the bits of the tokens that may come next. Raises FormError if there are none."""
        if self._closing:
            return self._vocabulary.not_ends
        bits = self._matcher.compute_bitmask()
        self._check()
        if self._openings:
            bits = _with_tokens(bits, self._openings)
        if not bits.strip(b"\0"):
            raise FormError("the form of the answer allows no token here", fix="look for a part that nothing can match")
        return bits

    def forced(self) -> Sequence[int]:
        """Return the tokens that the grammar leaves no choice about. A thought leaves every choice."""
        return () if self._closing or self._openings else self._matcher.compute_ff_tokens()

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on behind these tokens. Raises FormError for one that is not allowed."""
        for number, token in enumerate(token_ids):
            if not self._think(token):
                if not self._matcher.consume_tokens(list(token_ids[number:])):
                    self._check()
                return

    def fork(self) -> AnswerMatcher:
        """Return a matcher in the same state, which goes its own way from there."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but an end token."""
        return not (self._closing or self._openings) and self._matcher.is_stopped() and not self._matcher.is_error()

    def _think(self, token: int) -> bool:
        """Take in a token that belongs to a thought, and tell whether this one does."""
        openings, self._openings = self._openings, {}
        if token in openings:
            self._closing = openings[token]
            return True
        if not self._closing:
            is_space = self._in_gap and not self._vocabulary.bytes_of(token).strip()
            self._in_gap = is_space and not self._matcher.validate_tokens([token])
            return self._in_gap
        text = self._held + self._vocabulary.bytes_of(token)
        _, found, rest = text.partition(self._closing)
        self._held = text[1 - len(self._closing) :]
        if found:
            self._closing, self._in_gap = b"", True
            behind = self._vocabulary.tokens_of(rest.lstrip())  # of the token that ends the thought
            if behind and not self._matcher.consume_tokens(behind):
                self._check()
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise FormError("the form of the answer cannot be followed any more", actual=reason[:200])


def _with_tokens(bits: bytes, token_ids: Iterable[int]) -> bytes:
    more = bytearray(bits)
    for token in token_ids:
        more[token // 8] |= 1 << token % 8
    return bytes(more)
