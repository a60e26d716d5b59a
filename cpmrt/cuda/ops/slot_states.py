"""The recurrent states of slots, whatever mixer they belong to: where prompts begin, and in snapshots of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray

_THREADS = 256
_FLOATS = 4
"""Floats that a thread copies."""
COPY_STATE = KernelSpec("copy_state", "mixers/state.cu", reason="states where prompts begin and end")


class SlotStates:
    """Copies recurrent states between slots and snapshots: caches [layers, slots, ...], each with its snapshots."""

    def __init__(self, launcher: Launcher, states: Iterable[tuple[DeviceArray, DeviceArray]]):
        self._launch, self._states = launcher, tuple(states)

    def modules(self) -> tuple[Module, ...]:
        """Return the module of the copying kernel; none without recurrent states."""
        return ((COPY_STATE.file, {}),) if self._states else ()

    def load(self) -> None:
        """Load the kernel without running it: an admission that fails once its command is launched cannot be undone."""
        if self._states:
            self._launch.modules.kernel(COPY_STATE, {})

    def begin(self, slot: int, snapshot: int | None) -> None:
        """Set a slot's states to those of a snapshot, or to zero."""
        for states, snapshots in self._states:
            source = None if snapshot is None else snapshots[:, snapshot]
            self._copy(states[:, slot], source)

    def keep(self, slot: int, snapshot: int) -> None:
        """Copy a slot's states to a snapshot."""
        for states, snapshots in self._states:
            self._copy(snapshots[:, snapshot], states[:, slot])

    def _copy(self, to: DeviceArray, source: DeviceArray | None) -> None:
        count = to.size // len(to)
        strides = (to.strides[0] // to.itemsize, 0 if source is None else source.strides[0] // source.itemsize, count)
        grid = (-(-count // (_FLOATS * _THREADS)), len(to))
        self._launch(COPY_STATE, {}, grid, _THREADS, to, source, *map(np.int64, strides))
