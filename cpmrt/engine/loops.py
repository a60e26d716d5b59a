"""The detection of answers that repeat themselves and will hardly stop."""

from __future__ import annotations

from collections import deque

LEAST_TOKENS = 128
"""Repeated tokens, all repetitions together, below which nothing counts as a loop: tables and rulers repeat too."""
MAX_PERIOD = 512
"""The longest repeated run of tokens that is looked for."""
_ANCHOR = 8
"""Tokens in a row that must repeat before their distance is followed as a period. Every loop repeats at least 64."""


class LoopGuard:
    """Watches the tokens of one answer.

    It loops where its last max(`repeats` * p, LEAST_TOKENS) tokens have a period p <= MAX_PERIOD, that is, equal those
    p places before them. The time of a token grows with the earlier places of the last eight tokens, which are few
    until the answer loops.
    """

    def __init__(self, repeats: int):
        self._repeats = repeats
        self._last: deque[int] = deque(maxlen=_ANCHOR)
        self._anchors: deque[tuple[int, ...]] = deque()
        """The eight tokens that end at each of the last MAX_PERIOD places."""
        self._places: dict[tuple[int, ...], deque[int]] = {}
        """For each run of eight tokens among `_anchors`: the places where it ends, in ascending order."""
        self._num_places = 0
        self._runs: dict[int, int] = {}
        """For each period that the last token continues: how many tokens in a row equal the one a period before."""

    def push(self, token: int) -> bool:
        """Take the next token, and tell whether the answer loops with it."""
        self._last.append(token)
        if len(self._last) < _ANCHOR:
            return False
        anchor, place, before = tuple(self._last), self._num_places, self._runs
        earlier = self._places.setdefault(anchor, deque())
        self._runs = {place - other: before.get(place - other, _ANCHOR - 1) + 1 for other in earlier}
        self._remember(anchor, earlier, place)
        return any(run + p >= max(self._repeats * p, LEAST_TOKENS) for p, run in self._runs.items())

    def _remember(self, anchor: tuple[int, ...], places: deque[int], place: int) -> None:
        self._anchors.append(anchor)
        places.append(place)
        self._num_places += 1
        if len(self._anchors) > MAX_PERIOD:
            oldest = self._anchors.popleft()
            self._places[oldest].popleft()
            if not self._places[oldest]:
                del self._places[oldest]
