"""Follows one answer through its form: first a thought, if there may be one, then the grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

from cpmrt.engine.guide import Matcher
from cpmrt.errors import FormError
from cpmrt.grammar.advice import advice_for
from cpmrt.grammar.compiled_form import CompiledForm, Origin
from cpmrt.grammar.cursor import Cursors, Place
from cpmrt.grammar.mask_threads import MaskThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True)
class Thought:
    """The ways in which an answer may begin with a thought.

    `closing` are the bytes that end a thought which the prompt has opened, b"" if it has opened none. `openings` are
    the single tokens that may open a thought, each with the bytes that end it.
    """

    closing: bytes = b""
    openings: tuple[tuple[int, bytes], ...] = ()


NO_THOUGHT = Thought()


@dataclass(frozen=True)
class Vocabulary:
    """The functions and bits that a matcher needs of the vocabulary.

    `bytes_of` gives the bytes of a token, `tokens_of` the tokens of bytes; `not_ends` has the bits of all tokens except
    end tokens. `threads` compute the masks of several answers.
    """

    bytes_of: Callable[[int], bytes]
    tokens_of: Callable[[bytes], list[int]]
    not_ends: bytes
    threads: MaskThreads

    def spelled(self, text: str) -> list[int]:
        """Return the tokens of a text encoded character by character, so that none of them is a special token."""
        return [token for character in text for token in self.tokens_of(character.encode())]


class AnswerMatcher:
    """An `engine.guide.Matcher`: tells the engine which tokens may come next in one answer of a form."""

    def __init__(self, form: CompiledForm, vocabulary: Vocabulary, thought: Thought):
        self._form, self._vocabulary = form, vocabulary
        self._closing, self._openings = thought.closing, dict(thought.openings)
        """`_closing`: the bytes that end the open thought, b"" without one. `_openings`: emptied by the first token."""
        self._held = b""
        """The last bytes of the thought so far, in which its closing marker may have begun."""
        self._in_gap = False
        """Whether a thought has ended and since then only white space has come that the grammar does not take."""
        self._prepared: bytes | None = None
        """The bits of the tokens allowed here, if they were computed already, along with the masks of other answers."""
        self._behind: Place | None = None
        """The place in the grammar that this matcher is at; None is the beginning."""
        self._seconds = 0.0
        """The seconds of the last mask of this matcher, or of the one that it was forked from, if computed alone."""

    @cached_property
    def _cursors(self) -> Cursors:
        """The cursors of this answer and its forks. Made when needed: an answer that waits for its turn needs none."""
        return Cursors(self._form)

    @property
    def _place(self) -> Place:
        return self._behind or self._cursors.beginning

    @property
    def _matcher(self) -> LLMatcher:
        """llguidance's matcher at this matcher's place, until another fork asks for it."""
        return self._cursors.first.go_to(self._place)

    def prepare(self, others: Sequence[Matcher]) -> None:
        """Compute the masks of this matcher and of others at the same time, if that pays; some may be forks of one."""
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
        """Return the next tokens that the grammar leaves no choice about; none while a thought is open or may begin."""
        tokens = () if self._closing or self._openings else self._matcher.compute_ff_tokens()
        if not tokens:
            return ()
        num_valid: int = self._matcher.validate_tokens(tokens)
        if not num_valid:
            # If the text is the name of a special token, llguidance returns that token, which the grammar refuses.
            return self._vocabulary.spelled(self._vocabulary.bytes_of(tokens[0]).decode())
        return tokens[:num_valid]

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take these tokens as the next of the answer. Raises FormError for one that is not allowed."""
        self._prepared = None
        for number, token in enumerate(token_ids):
            if not self._think(token):
                self._consume(token_ids[number:])
                return

    def fork(self) -> AnswerMatcher:
        """Return a matcher in the same state, which is independent of this one from then on."""
        _ = self._cursors  # made now, so that both share them
        return copy(self)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but an end token."""
        return not (self._closing or self._openings) and self._matcher.is_stopped() and not self._matcher.is_error()

    def _think(self, token: int) -> bool:
        """Take a token if it belongs to a thought or to the gap after it, and return whether it does."""
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
            behind = self._vocabulary.tokens_of(rest.lstrip())  # the rest of the token that ends the thought
            if behind:
                self._consume(behind)
        return True

    def _consume(self, token_ids: Sequence[int]) -> None:
        """Let the grammar take these tokens. Raises FormError for one that is not allowed."""
        self._behind = self._cursors.first.consume(self._place, token_ids)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            what = "the form of the answer cannot be followed any more"
            raise FormError(what, actual=reason[:200], fix=advice_for(reason))


def _with_tokens(bits: bytes, token_ids: Iterable[int]) -> bytes:
    more = bytearray(bits)
    for token in token_ids:
        more[token // 8] |= 1 << token % 8
    return bytes(more)
