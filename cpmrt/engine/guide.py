"""What one sequence under a grammar may sample next, while its steps are in flight.

The mask of a step needs the token before it. So the last step that was submitted may have an empty mask, which is
filled as soon as the step before it is done: the layers run meanwhile. Tokens that the grammar leaves no choice about
are not sampled one by one. The first of such a run is still taken by a plain step, whose mask allows nothing else, and
the rest follows as one `FastForward` step. Which tokens these are depends on the answer alone, not on what is in
flight, so that an answer has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cpmrt.errors import FormError
from cpmrt.executor import Mask

MIN_RUN = 2
"""The fewest certain tokens that make a FastForward step."""


class Matcher(Protocol):
    """Follows one answer through its grammar (`cpmrt.grammar`). Raises FormError where the answer cannot go on."""

    def allowed(self) -> bytes | None:
        """Return which tokens may come next, as `Mask.bits` has them."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that come next for certain."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on to the state behind these tokens."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        ...


class Guide:
    """Gives the steps of one sequence their masks. `max_run`: the most tokens of a FastForward step, 0 for none.

    A token that ends the answer (`stop_ids`) is sampled even if it is certain.

    Where `matcher` fails, the steps in flight may sample anything, and `failure` says why their results do not count.
    """

    def __init__(self, matcher: Matcher, max_run: int, stop_ids: Sequence[int] = ()):
        self._matcher, self._max_run, self._stop_ids = matcher, max_run, stop_ids
        self._mask: Mask | None = None
        """The mask of the step that was submitted last."""
        self.run: tuple[int, ...] = ()
        """Certain tokens to fast-forward over, behind the step that was submitted last, which samples the first."""
        self.failure: FormError | None = None
        self._ahead: tuple[int, ...] = ()
        """Certain tokens that submitted steps and `run` will bring."""
        self._certain: tuple[int, ...] = ()
        """Certain tokens behind those ahead. The matcher is behind both."""

    @property
    def is_ready(self) -> bool:
        """Whether another step may be submitted."""
        return self._mask is None or self._mask.is_filled

    @property
    def num_ahead(self) -> int:
        """The number of certain tokens that no result has brought yet, up to the end of `run`."""
        return len(self._ahead)

    @property
    def is_complete(self) -> bool:
        """Whether the tokens that are taken are a whole answer that nothing can follow."""
        return not (self._ahead or self._certain or self.failure) and self._matcher.is_complete

    def next_mask(self, room: int, *, is_known: bool) -> Mask:
        """Return the mask of the next step, filled if all tokens before it are known; `room` as for `fill`."""
        self._mask, self.run = Mask(), ()
        if is_known:
            self.fill(room)
        return self._mask

    def take(self, token_ids: Sequence[int], room: int) -> tuple[int, ...]:
        """Note the tokens that a step has brought, and return certain ones behind them with which the answer ends.

        Mostly there are none. `room`: for how many tokens there was room before these.
        """
        known = len(self._ahead)
        if tuple(token_ids[:known]) != self._ahead[: len(token_ids)]:
            self.failure = FormError("a token was sampled that the mask of its row does not allow", fix="report this")
        self._ahead = self._ahead[len(token_ids) :]
        if self.failure is None and token_ids[known:]:
            try:
                self._matcher.accept(token_ids[known:])
            except FormError as error:
                self.failure = error
        if self._ahead or not (self._certain and self._max_run and self._matcher.is_complete):
            return ()
        room = max(room - len(token_ids), 0)
        rest, self._certain = self._certain[:room], self._certain[room:]
        return rest

    def fill(self, room: int) -> None:
        """Fill the mask of the last step, if it is empty: the token before it is known now.

        `room`: for how many more tokens there is room, behind those that are taken.
        """
        if self._mask is None or self._mask.is_filled:
            return
        bits: bytes | None = None
        try:
            if self.failure is None:
                bits = self._next_bits(room)
        except FormError as error:
            self.failure = error
        self._mask.fill(bits)

    def let_go(self) -> None:
        """Have the steps in flight, whose results do not count, sample anything."""
        if self._mask is not None and not self._mask.is_filled:
            self._mask.fill(None)
        self._mask, self.run = None, ()
        self._ahead, self._certain = (), (*self._ahead, *self._certain)

    def _next_bits(self, room: int) -> bytes | None:
        if not self._certain:
            self._certain = tuple(self._matcher.forced())
            if not self._certain:
                return self._matcher.allowed()
            self._matcher.accept(self._certain)
        count = self._run_length(room - len(self._ahead))
        brought, self._certain = self._certain[:count], self._certain[count:]
        self.run = brought if count >= MIN_RUN else ()
        self._ahead += brought
        return _only(brought[0])

    def _run_length(self, room: int) -> int:
        """Return how many of the certain tokens the step in question and a FastForward step behind it take, at least 1.

        The latter samples one more; where nothing is left to sample no such step is needed.
        """
        longest = 0 if self._matcher.is_complete else min(room - 1, self._max_run, len(self._certain))
        stops = (at for at, token in enumerate(self._certain[:longest]) if token in self._stop_ids)
        length = next(stops, longest)
        return length if length >= MIN_RUN else 1


def _only(token: int) -> bytes:
    """Return the bits that allow one token. The bytes behind its own, which are 0, are left out."""
    return bytes(token // 8) + bytes([1 << token % 8])
