"""The steps that an executor has taken and whose results are not collected yet."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from os import sched_yield
from typing import NamedTuple

from cpmrt.engine.sequence import Sequence
from cpmrt.executor import Executor, Pending, Speculate, Step, StepResult


class StepInFlight(NamedTuple):
    """A submitted step, and the sequences that its result is for; Admit, Keep, Recall and Release have none."""

    step: Step
    sequences: tuple[Sequence, ...]
    pending: Pending


class StepsInFlight:
    """Steps in the order in which they were submitted; results are collected in that order."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._steps = deque[StepInFlight]()
        self.num_awaited = 0
        """The number of steps in flight that have results for sequences."""

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, step: Step, sequences: tuple[Sequence, ...]) -> None:
        """Submit a step to the executor. If the executor raises, so does this, and the step is not in flight."""
        self._steps.append(StepInFlight(step, sequences, self._executor.submit(step)))
        self.num_awaited += bool(sequences)

    @property
    def oldest(self) -> StepInFlight:
        return self._steps[0]

    def collect(self) -> StepResult:
        """Wait for the oldest step and return its result. Even if it has failed, it is no longer in flight then.

        An interrupt, which is no Exception, leaves the step in flight, to be waited for again.
        """
        try:
            result = self._steps[0].pending.wait()
        except Exception:
            self._forget_oldest()
            raise
        self._forget_oldest()
        return result

    def give_masks(self) -> None:
        """Wait until the tree of the newest step, if it has one, has its masks: the next call may be a long time away.

        Not if the result of a step before it is unknown, because the wait for that was interrupted: the masks depend on
        it. An error is left to be raised again by `collect`.
        """
        if self.num_awaited != 1:
            return
        step, _, pending = self._steps[-1]
        if isinstance(step, Speculate) and step.masks is not None:
            with suppress(Exception):
                while step.masks.bits is None and not pending.is_done():
                    sched_yield()

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()
        self.num_awaited = 0

    def _forget_oldest(self) -> None:
        self.num_awaited -= bool(self._steps.popleft().sequences)
