"""Step shapes captured as CUDA graphs: once each, replayed for ever."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from cupy.cuda.runtime import CUDARuntimeError

from cpmrt.cuda.device import device_fault


class Graphs:
    """Runs named launch sequences on one stream: as graph replays, or launch by launch where graphs are off."""

    def __init__(self, stream: Any, *, enabled: bool):
        self._stream, self._enabled = stream, enabled
        self._captured: dict[Hashable, Any] = {}
        self._sequences: dict[Hashable, Callable[[], None]] = {}

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

    def run(self, key: Hashable) -> None:
        """Start one sequence; waits for nothing. Raises DeviceError after a fault of the device."""
        if not self._enabled:
            self._sequences[key]()
            return
        try:
            self._captured[key].launch(self._stream)
        except CUDARuntimeError as error:
            raise device_fault(error) from error

    def close(self) -> None:
        """Free the graphs."""
        self._captured.clear()
        self._sequences.clear()
