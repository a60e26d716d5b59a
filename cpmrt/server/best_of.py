"""Answers to completions with `best_of`: of more choices than are asked for, the likeliest are kept."""

from __future__ import annotations

from collections.abc import Sequence

from cpmrt.server.answers import CompletionAnswer
from cpmrt.server.engine_thread import Item
from cpmrt.server.token_logprobs import ChoiceLogprobs
from cpmrt.sharing.jobs import Ended


class BestOf(CompletionAnswer):
    """Gives the `num_kept` of every `num_tried` choices whose tokens have the highest mean log-probability, best first.

    The requests must ask for log-probabilities, though the answer need not have them.
    """

    def __init__(self, num_kept: int, num_tried: int, echoes: Sequence[str], logprobs: Sequence[ChoiceLogprobs]):
        super().__init__(echoes, logprobs)
        self._num_kept, self._num_tried = num_kept, num_tried
        self._sums, self._counts = [0.0] * len(echoes), [0] * len(echoes)

    def add(self, item: Item) -> None:
        super().add(item)
        choice, part = item
        if not isinstance(part, Ended):
            self._sums[choice] += sum(entry.logprob for entry in part.logprobs)
            self._counts[choice] += len(part.logprobs)

    def kept(self) -> Sequence[int]:
        kept: list[int] = []
        for start in range(0, len(self._sums), self._num_tried):
            group = range(start, start + self._num_tried)
            kept += sorted(group, key=self._mean_logprob, reverse=True)[: self._num_kept]
        return kept

    def _mean_logprob(self, choice: int) -> float:
        return self._sums[choice] / self._counts[choice] if self._counts[choice] else float("-inf")
