"""Follows one answer through its form: a thought first, where there may be one, then the grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

from cpmrt.engine.guide import Matcher
from cpmrt.errors import FormError
from cpmrt.grammar.compiled_form import CompiledForm, Origin
from cpmrt.grammar.cursor import Cursors, Place
from cpmrt.grammar.mask_threads import MaskThreads

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


NO_THOUGHT = Thought()


@dataclass(frozen=True)
class Vocabulary:
    """What a matcher knows of tokens: the bytes of each, the tokens of bytes, and the bits of all but end tokens.

    `threads` compute the masks of several answers.
    """

    bytes_of: Callable[[int], bytes]
    tokens_of: Callable[[bytes], list[int]]
    not_ends: bytes
    threads: MaskThreads

    def spelled(self, text: str) -> list[int]:
        """Return the tokens of a text character by character, so that no special token is among them."""
        return [token for character in text for token in self.tokens_of(character.encode())]


class AnswerMatcher:
    """Tells the engine which tokens may come next in one answer of this form: an `engine.guide.Matcher`."""

    def __init__(self, form: CompiledForm, vocabulary: Vocabulary, thought: Thought):
        self._form, self._vocabulary = form, vocabulary
        self._closing, self._openings = thought.closing, dict(thought.openings)
        """`_closing`: what ends the thought that is open, b"" if none is. `_openings`: empty behind the first token."""
        self._held = b""
        """The end of the thought so far, where its marker may have begun."""
        self._in_gap = False
        """Whether nothing but a thought, and white space that the grammar does not take, has come."""
        self._prepared: bytes | None = None
        """What the grammar allows here, if that was computed with the masks of other answers."""
        self._behind: Place | None = None
        """The place of this answer's state; None is the beginning."""
        self._seconds = 0.0
        """What the last mask of this matcher, or of the one that it is a fork of, took or would have taken alone."""

    @cached_property
    def _cursors(self) -> Cursors:
        """Follow the grammar, for this answer and its forks. An answer that still waits for its turn needs none."""
        return Cursors(self._form)

    @property
    def _place(self) -> Place:
        return self._behind or self._cursors.beginning

    @property
    def _matcher(self) -> LLMatcher:
        """The grammar's matcher, in this answer's state until another fork asks for it."""
        return self._cursors.first.go_to(self._place)

    def prepare(self, others: Sequence[Matcher]) -> None:
        """Compute what the grammars of this matcher and of others allow, at the same time; some may be forks of one."""
        asked = [each for each in (self, *others) if isinstance(each, AnswerMatcher) and not each._closing]
        threads, of_answers = self._vocabulary.threads, dict[Cursors, list[AnswerMatcher]]()
        for each in asked:
            of_answers.setdefault(each._cursors, []).append(each)
        if not threads.pay(len(of_answers), len(asked), sum(each._seconds for each in asked)):
            return
        while of_answers:
            together: list[tuple[Origin, AnswerMatcher, LLMatcher]] = []
            for cursors, forks in list(of_answers.items()):
                for cursor in cursors.up_to(min(len(forks), threads.num_threads)):
                    fork = forks.pop()
                    together.append((cursor.origin, fork, cursor.go_to(fork._place)))
                if not forks:
                    del of_answers[cursors]
            together.sort(key=lambda one: id(one[0]))
            begun = perf_counter()
            masks = threads.masks([matcher for _, _, matcher in together])
            alone = (perf_counter() - begun) * min(threads.num_threads, len(together)) / len(together)
            for (_, each, matcher), bits in zip(together, masks, strict=True):
                each._prepared, each._seconds = None if matcher.is_error() else bits, alone

    def allowed(self) -> bytes:
        """Return the bits of the tokens that may come next. Raises FormError if there are none."""
        if self._closing:
            return self._vocabulary.not_ends
        bits, self._prepared = self._prepared, None
        if bits is None:
            begun = perf_counter()
            bits = self._matcher.compute_bitmask()
            self._seconds = perf_counter() - begun
            self._check()
        if self._openings:
            bits = _with_tokens(bits, self._openings)
        if not bits.strip(b"\0"):
            raise FormError("the form of the answer allows no token here", fix="look for a part that nothing can match")
        return bits

    def forced(self) -> Sequence[int]:
        """Return the tokens that the grammar leaves no choice about. A thought leaves every choice."""
        tokens = () if self._closing or self._openings else self._matcher.compute_ff_tokens()
        if not tokens:
            return ()
        num_valid: int = self._matcher.validate_tokens(tokens)
        if not num_valid:
            # A text that is the name of a special token comes as that token, which the grammar refuses.
            return self._vocabulary.spelled(self._vocabulary.bytes_of(tokens[0]).decode())
        return tokens[:num_valid]

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on behind these tokens. Raises FormError for one that is not allowed."""
        self._prepared = None
        for number, token in enumerate(token_ids):
            if not self._think(token):
                self._consume(token_ids[number:])
                return

    def fork(self) -> AnswerMatcher:
        """Return a matcher in the same state, which goes its own way from there."""
        _ = self._cursors  # which both share
        return copy(self)

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
            if behind:
                self._consume(behind)
        return True

    def _consume(self, token_ids: Sequence[int]) -> None:
        """Have the grammar go on behind these tokens. Raises FormError for one that is not allowed."""
        self._behind = self._cursors.first.consume(self._place, token_ids)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise FormError("the form of the answer cannot be followed any more", actual=reason[:200])


def _with_tokens(bits: bytes, token_ids: Iterable[int]) -> bytes:
    more = bytearray(bits)
    for token in token_ids:
        more[token // 8] |= 1 << token % 8
    return bytes(more)
