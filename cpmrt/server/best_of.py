"""Completions of which more are made than given: the likeliest are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpmrt.server.answers import CompletionAnswer, LogprobWriter


class BestOf(CompletionAnswer):
    """Gives the `num_kept` of every `num_tried` choices whose tokens have the highest mean log-probability, best first.

    The requests must ask for log-probabilities, though the answer need not have them.
    """

    def __init__(self, num_kept: int, num_tried: int, echoes: Sequence[str], logprobs: LogprobWriter | None):
        super().__init__(echoes, logprobs)
        self._num_kept, self._num_tried = num_kept, num_tried

    def choices(self) -> list[dict[str, Any]]:
        tried = super().choices()
        kept: list[dict[str, Any]] = []
        for start in range(0, len(tried), self._num_tried):
            group = range(start, start + self._num_tried)
            kept += [tried[index] for index in sorted(group, key=self._mean_logprob, reverse=True)[: self._num_kept]]
        return [{**choice, "index": index} for index, choice in enumerate(kept)]

    def _mean_logprob(self, choice: int) -> float:
        logprobs = [entry.logprob for entry in self._entries[choice]]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
