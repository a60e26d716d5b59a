"""Step shapes captured as CUDA graphs: once each, replayed for ever."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import gcd
from typing import Any

import numpy as np
from cupy.cuda.runtime import CUDARuntimeError

from cpmrt.cuda.driver.device import device_fault
from cpmrt.cuda.driver.launch_queue import LaunchQueue
from cpmrt.cuda.driver.loop_graph import LoopGraph

_MOST_STEPS_PER_PASS = 4
"""A WHILE node needs about 5 us to pass its body once more."""


class Graphs:
    """Runs named launch sequences on one stream: as graph replays, or launch by launch where graphs are off.

    With `steps_per_launch` above 1, which needs graphs, so many equal steps in a row are one launch.
    """

    def __init__(self, stream: Any, *, enabled: bool, steps_per_launch: int = 1):
        self._stream, self._enabled, self._steps_per_launch = stream, enabled, steps_per_launch
        self._captured: dict[Hashable, Any] = {}
        self._loops: dict[Hashable, LoopGraph] = {}
        self._sequences: dict[Hashable, Callable[[], None]] = {}
        self._queue = LaunchQueue(self._start, steps_per_launch)

    def add(self, key: Hashable, launches: Callable[[], None]) -> None:
        """Capture `launches`, which must have run before: a capture may neither load modules nor allocate."""
        self._sequences[key] = launches
        if not self._enabled:
            return
        with self._stream:
            self._stream.begin_capture()
            try:
                launches()
            finally:
                graph = self._stream.end_capture()
        graph.upload(self._stream)
        self._captured[key] = graph

    def add_step(self, key: Hashable, launches: Callable[[], None], loop_end: Callable[..., None]) -> None:
        """The same for a step. `loop_end(handle, passes, steps a pass)` launches what ends a pass of a loop of them."""
        self.add(key, launches)
        if self._steps_per_launch == 1:
            return
        num_steps = gcd(self._steps_per_launch, _MOST_STEPS_PER_PASS)

        def body(handle: np.uint64) -> None:
            for _ in range(num_steps):
                launches()
            loop_end(handle, self._steps_per_launch // num_steps, num_steps)

        self._loops[key] = LoopGraph(self._stream, body)

    def run(self, key: Hashable) -> None:
        """Start one sequence; waits for nothing. Raises DeviceError after a fault of the device."""
        self._queue.flush()
        self._start(key, 1)

    def run_step(self, key: Hashable, slots: tuple[int, ...]) -> None:
        """The same for a step on these slots, which may start only once there are others to start with it."""
        self._queue.add(key, slots)

    @property
    def num_waiting(self) -> int:
        """Steps that have not started, of those that were run last."""
        return self._queue.num_waiting

    def start_waiting(self) -> None:
        """Start them, however few they are."""
        self._queue.flush()

    def close(self) -> None:
        """Free the graphs."""
        for loop in self._loops.values():
            loop.close()
        self._loops.clear()
        self._captured.clear()
        self._sequences.clear()

    def _start(self, key: Hashable, num_steps: int) -> None:
        if not self._enabled:
            self._sequences[key]()
            return
        try:
            if num_steps > 1:
                self._loops[key].launch()
            else:
                self._captured[key].launch(self._stream)
        except CUDARuntimeError as error:
            raise device_fault(error) from error
