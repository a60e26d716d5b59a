"""Streams whose every chunk has the usage so far, as `continuous_usage_stats` of vLLM asks for it."""

from __future__ import annotations

from typing import Any

from cpmrt.server.answers import Answer, OpenAIFormat
from cpmrt.server.engine_thread import Item
from cpmrt.sharing.jobs import Ended


class RunningUsageFormat(OpenAIFormat):
    """Writes streams of the tokens of prompts, `num_prompt_tokens` in all, and of their choices so far."""

    def __init__(self, head: dict[str, Any], answer: Answer, *, include_usage: bool, num_prompt_tokens: int):
        super().__init__(head, answer, include_usage=include_usage)
        self._num_prompt_tokens = num_prompt_tokens
        self._counts: dict[int, int] = {}
        """The tokens of each choice that has some."""

    def begin(self) -> str:
        self._count()
        return super().begin()

    def stream(self, item: Item) -> str:
        choice, part = item
        # The token that ends a text comes with the end alone.
        so_far = self._counts.get(choice, 0)
        self._counts[choice] = part.stats.new_tokens if isinstance(part, Ended) else so_far + len(part.token_ids)
        self._count()
        return super().stream(item)

    def _count(self) -> None:
        prompt, completion = self._num_prompt_tokens, sum(self._counts.values())
        total = prompt + completion
        self._chunks.carry({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total})
