"""Steps that wait for others like them, so that one launch runs them all."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class LaunchQueue:
    """`start(key, count)` launches a step `count` times: `steps_per_launch` times, or once.

    Whoever has to have a result of a step that waits, or has something else to launch, calls `flush` before.
    """

    def __init__(self, start: Callable[[Hashable, int], None], steps_per_launch: int):
        self._start, self._steps_per_launch = start, steps_per_launch
        self._kind: tuple[Hashable, tuple[int, ...]] | None = None
        self.num_waiting = 0
        """Steps that were added last and are not launched yet, all alike."""

    def add(self, key: Hashable, slots: tuple[int, ...]) -> None:
        """A step on these slots, behind those added before. Steps are alike if key and slots are the same."""
        if self._steps_per_launch == 1:
            self._start(key, 1)
            return
        if self.num_waiting and self._kind != (key, slots):
            self.flush()
        self._kind = (key, slots)
        self.num_waiting += 1
        if self.num_waiting == self._steps_per_launch:
            self.num_waiting = 0
            self._start(key, self._steps_per_launch)

    def flush(self) -> None:
        """Launch what waits, one by one."""
        if not self.num_waiting:
            return
        assert self._kind is not None
        (key, _), count, self.num_waiting = self._kind, self.num_waiting, 0
        for _ in range(count):
            self._start(key, 1)
