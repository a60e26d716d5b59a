"""Lets the forks of an answer's matcher share one matcher of llguidance, which is moved between their places.

A copy per fork would take longer with each token of the answer, and a drafted tree has a fork for each node. Several
such matchers can work at the same time if the form was compiled separately for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpmrt.grammar.compiled_form import CompiledForm, Origin

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Place:
    """The state of a matcher after some tokens: `token_ids`, after the place `before` (None at the beginning)."""

    __slots__ = ("before", "depth", "token_ids")

    def __init__(self, before: Place | None, token_ids: tuple[int, ...]):
        self.before, self.token_ids = before, token_ids
        self.depth: int = before.depth + 1 if before else 0
        """The number of places before this one."""


class Cursor:
    """A matcher of a form that can be moved between places; it starts at `beginning`."""

    def __init__(self, origin: Origin, beginning: Place):
        self.origin, self._beginning = origin, beginning
        self._matcher, self._at = origin.copy_for(self), beginning

    def go_to(self, place: Place) -> LLMatcher:
        """Return the matcher, moved to a place; it stays there until this is called for another place.

        A matcher that has failed cannot be rolled back. Then a fresh copy goes all the way from the beginning, as other
        places need not have failed.
        """
        if place is not self._at:
            num_undone, missing = self._way_to(place)
            if self._matcher.is_error() or (num_undone and not self._matcher.rollback(num_undone)):
                self._matcher, self._at = self.origin.copy_for(self), self._beginning
                _, missing = self._way_to(place)
            for each in missing:
                self._matcher.consume_tokens(list(each.token_ids))
            self._at = place
        return self._matcher

    def consume(self, place: Place, token_ids: Sequence[int]) -> Place:
        """Let the matcher take these tokens after `place`; return the place after them. If they are not allowed, the
        matcher has failed then."""
        behind = Place(place, tuple(token_ids))
        self.go_to(place).consume_tokens(list(token_ids))
        self._at = behind
        return behind

    def _way_to(self, place: Place) -> tuple[int, list[Place]]:
        """Return how many tokens to roll back, and the places to go through from there to `place`."""
        back, there, num_undone, missing = self._at, place, 0, list[Place]()
        while back is not there:
            if back.before is not None and back.depth >= there.depth:
                num_undone += len(back.token_ids)
                back = back.before
            else:
                assert there.before is not None, "a place of another answer"
                missing.append(there)
                there = there.before
        return num_undone, missing[::-1]


class Cursors:
    """The cursors of one answer: the first follows the answer, others work at other places at the same time."""

    def __init__(self, form: CompiledForm):
        self.beginning = Place(None, ())
        self._form, self._all = form, [Cursor(form.origin(), self.beginning)]

    @property
    def first(self) -> Cursor:
        return self._all[0]

    def up_to(self, most: int) -> list[Cursor]:
        """Return at most `most` cursors that can work at the same time.

        If there are fewer, add one, provided that an origin is there which no other cursor of this answer uses.
        """
        if len(self._all) < most:
            origin = self._form.origin()
            if all(cursor.origin is not origin for cursor in self._all):
                self._all.append(Cursor(origin, self.beginning))
        return self._all[:most]
