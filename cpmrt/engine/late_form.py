"""An answer that is free until it says a certain text, from which on a grammar binds it.

Until then its steps have no masks: they run ahead and draft as those of any other sequence. The step that brings the
end of the text may bring more tokens, and other steps are in flight: tokens behind that end do not count. The sequence
pauses, and goes on under the grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cpmrt.engine.guide import Guide, Matcher


class Bound(NamedTuple):
    """The beginning of a grammar: `matcher` is in the state behind the last token, or before it if that is not kept."""

    matcher: Matcher
    is_kept: bool


class Trigger(Protocol):
    """Looks in one answer for the text from which on a grammar binds it."""

    def push(self, token: int) -> Bound | None:
        """Take the next token, and return the beginning of the grammar if it binds from here on."""
        ...


class LateForm:
    """The form of an answer that is free so far. `guide_of` makes the answer's guide out of the grammar's matcher."""

    def __init__(self, trigger: Trigger, guide_of: Callable[[Matcher], Guide]):
        self._trigger, self._guide_of = trigger, guide_of

    def push(self, token: int) -> tuple[Guide, bool] | None:
        """Take the next token. If the grammar binds now, return the guide from here on and whether the token stays."""
        bound = self._trigger.push(token)
        return None if bound is None else (self._guide_of(bound.matcher), bound.is_kept)
