"""The conversation of `cpmrt chat`, and a model in this process that answers it."""

from __future__ import annotations

from cpmrt import LLM
from cpmrt.config import SamplingParams
from cpmrt.sharing.text_stream import TextStream

Message = dict[str, str]
_ANSWER_ROOM = 1024
"""Tokens of the context that are kept free for an answer that may go on until the context is full."""


class Conversation:
    """The turns of a chat, questions with their answers, after a system message that always stays."""

    def __init__(self, system: str | None):
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[tuple[Message, Message]] = []

    @property
    def num_turns(self) -> int:
        """The number of questions that were answered and are remembered."""
        return len(self._turns)

    def asked(self, question: str, *, skip: int = 0) -> list[Message]:
        """Return all messages but those of the `skip` oldest turns, and one more question, which is not kept yet."""
        turns = [message for turn in self._turns[skip:] for message in turn]
        return [*self._system, *turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self._turns.append(({"role": "user", "content": question}, {"role": "assistant", "content": answer}))

    def drop_oldest(self, count: int) -> None:
        """Forget the oldest questions and their answers."""
        del self._turns[:count]

    def reset(self) -> None:
        self._turns.clear()


class LocalModel:
    """Chats through an LLM."""

    def __init__(
        self, llm: LLM, params: SamplingParams, enable_thinking: bool | None, allow_special_tokens: bool = False
    ):
        self._llm, self._params = llm, params
        self._enable_thinking, self._allow_special_tokens = enable_thinking, allow_special_tokens

    def check(self, conversation: Conversation) -> None:
        """Raise RequestError if the model cannot chat at all, or not with this system message."""
        self._prompt(conversation.asked("?"))

    def open(self, conversation: Conversation, question: str) -> tuple[TextStream, int]:
        """Begin the answer to one more question; also return how many of the oldest turns had to be left out of it."""
        prompt, num_dropped = self.fit(conversation, question)
        return self._llm.stream(prompt, self._params), num_dropped

    def fit(self, conversation: Conversation, question: str) -> tuple[list[int], int]:
        """Return the prompt for one more question, without the oldest turns where it does not fit, and their number.

        What is too long even without any is returned all the same: `LLM.stream` refuses it with the figures.
        """
        context = self._llm.max_context
        room = context - (self._params.max_new_tokens or min(_ANSWER_ROOM, context // 4))
        for skip in range(conversation.num_turns + 1):
            ids = self._prompt(conversation.asked(question, skip=skip))
            if len(ids) <= room:
                break
        return ids, skip

    def _prompt(self, messages: list[Message]) -> list[int]:
        return self._llm.chat_prompt(
            messages, enable_thinking=self._enable_thinking, allow_special_tokens=self._allow_special_tokens
        )
