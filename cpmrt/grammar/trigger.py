"""Finds where a grammar begins to bind an answer that is free until a certain text, such as that of a tool call."""

from __future__ import annotations

from collections.abc import Sequence

from cpmrt.engine.late_form import Bound
from cpmrt.errors import FormError
from cpmrt.grammar.compiled_form import CompiledForm
from cpmrt.grammar.matcher import NO_THOUGHT, AnswerMatcher, Vocabulary
from cpmrt.text.markers import THINKING_PAIRS

_THOUGHTS = {opening.encode(): closing.encode() for opening, closing in THINKING_PAIRS.items()}


class GrammarTrigger:
    """The engine's trigger (`engine.late_form.Trigger`) of one answer.

    `text` is the text that the grammar of `form` begins with. It does not count inside a thought, which is either
    opened by the prompt (`prompt_closing` ends it then) or begins the answer. Thoughts at the beginning of the answer
    are not looked for if `text` itself begins with an opening marker.
    """

    def __init__(self, text: bytes, form: CompiledForm, vocabulary: Vocabulary, prompt_closing: bytes):
        self._text, self._form, self._vocabulary = text, form, vocabulary
        self._closing = prompt_closing
        """The bytes that end the open thought, b"" if none is open."""
        self._may_begin = not (prompt_closing or text.startswith(tuple(_THOUGHTS)))
        """Whether a thought may begin: only white space, and perhaps a part of an opening marker, has come."""
        self._thought = b""
        """A part of an opening marker, or the end of the open thought, in which its closing marker may have begun."""
        self._held: list[tuple[int, bytes]] = []
        """The last tokens with their bytes, in which `text` may have begun."""

    def push(self, token: int) -> Bound | None:
        """Take the next token of the answer; return how the grammar begins if it binds from here on."""
        if self._think(token):
            return None
        self._held.append((token, self._vocabulary.bytes_of(token)))
        written = b"".join(piece for _, piece in self._held)
        start = written.find(self._text)
        if start >= 0:
            bound = self._bound(start, written)
            self._held.clear()
            return bound
        while self._held and len(written) - len(self._held[0][1]) >= len(self._text) - 1:
            written = written[len(self._held.pop(0)[1]) :]
        return None

    def _think(self, token: int) -> bool:
        """Take a token if it belongs to a thought, and return whether it does."""
        if not (self._closing or self._may_begin):
            return False
        text = self._thought + self._vocabulary.bytes_of(token)
        if self._may_begin:
            text = text.lstrip()
            self._closing = next((closing for opening, closing in _THOUGHTS.items() if text.startswith(opening)), b"")
            self._may_begin = not self._closing and any(opening.startswith(text) for opening in _THOUGHTS)
            if not self._closing:
                self._thought = text
                return False
            self._held.clear()
        self._thought = text[-len(self._closing) :]
        if self._closing in text:
            self._closing = b""
        return True

    def _bound(self, start: int, written: bytes) -> Bound | None:
        """Let the grammar take `written` from `start` on, and return where it binds; None if it cannot.

        It takes the tokens that the model chose if one of them begins at `start`, else tokens of the same bytes. If it
        refuses what the last token has after the text, it binds from before that token.
        """
        last = len(self._held[-1][1])
        ends, at = [0], 0
        for _, piece in self._held:
            at += len(piece)
            ends.append(at)
        if start in ends[:-1]:
            tokens: Sequence[int] = [token for token, _ in self._held[ends.index(start) :]]
            before = tokens[:-1]
        else:
            tokens = self._vocabulary.tokens_of(written[start:])
            before = self._vocabulary.tokens_of(written[start : max(len(written) - last, start)])
        for taken, is_kept in ((tokens, True), (before, False)):
            matcher = matcher_behind(taken, self._form, self._vocabulary)
            if matcher is not None:
                return Bound(matcher, is_kept)
        return None


def matcher_behind(token_ids: Sequence[int], form: CompiledForm, vocabulary: Vocabulary) -> AnswerMatcher | None:
    """Return a matcher that has taken these tokens; None if the form does not begin with them."""
    matcher = AnswerMatcher(form, vocabulary, NO_THOUGHT)
    try:
        matcher.accept(token_ids)
    except FormError:
        return None
    return matcher
