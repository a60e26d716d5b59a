"""A model in this process, for `cpmrt chat`."""

from __future__ import annotations

from collections.abc import Iterator

from cpmrt import LLM
from cpmrt.cli.conversation import Conversation, fit
from cpmrt.cli.cost import cost_lines
from cpmrt.config import SamplingParams
from cpmrt.generation import Piece, TextStream


class LocalModel:
    """Chats through an LLM."""

    def __init__(self, llm: LLM, params: SamplingParams, enable_thinking: bool | None):
        self._llm, self._params, self._enable_thinking = llm, params, enable_thinking

    def check(self, conversation: Conversation) -> None:
        """Raise RequestError if the model cannot chat at all, or not with this system message."""
        self._llm.chat_prompt(conversation.asked("?"), enable_thinking=self._enable_thinking)

    def open(self, conversation: Conversation, question: str) -> tuple[LocalStream, int]:
        """The answer to one more question, and how many of the oldest turns had to be left out of it."""
        prompt, num_dropped = fit(self._llm, conversation, question, self._params, self._enable_thinking)
        return LocalStream(self._llm.stream(prompt, self._params)), num_dropped


class LocalStream(Iterator[Piece]):
    """Iterates over the pieces of an answer; closing it cancels."""

    def __init__(self, stream: TextStream):
        self._stream = stream

    def __enter__(self) -> LocalStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __next__(self) -> Piece:
        return next(self._stream)

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._stream.completion.text

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "cancelled"."""
        return self._stream.completion.finish_reason

    @property
    def cost(self) -> list[str]:
        """Lines about what the answer cost so far."""
        return cost_lines(self._stream.completion)

    def close(self) -> None:
        """Cancel. May be called again."""
        self._stream.close()
