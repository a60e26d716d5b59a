"""The turns of a chat, and which of them still fit the context."""

from __future__ import annotations

from cpmrt import LLM
from cpmrt.config import SamplingParams

Message = dict[str, str]


class Conversation:
    """Questions with their answers, after a system message that always stays."""

    def __init__(self, system: str | None):
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[tuple[Message, Message]] = []

    @property
    def num_turns(self) -> int:
        """Questions that were answered and are remembered."""
        return len(self._turns)

    def asked(self, question: str, *, skip: int = 0) -> list[Message]:
        """All messages but those of the `skip` oldest turns, and one more question, of which nothing is kept yet."""
        turns = [message for turn in self._turns[skip:] for message in turn]
        return [*self._system, *turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Keep a question with its answer."""
        self._turns.append(({"role": "user", "content": question}, {"role": "assistant", "content": answer}))

    def drop_oldest(self, count: int) -> None:
        """Forget the oldest questions and their answers."""
        del self._turns[:count]

    def reset(self) -> None:
        """Forget all but the system message."""
        self._turns.clear()


def fit(
    llm: LLM, conversation: Conversation, question: str, params: SamplingParams, enable_thinking: bool | None
) -> tuple[list[int], int]:
    """The prompt for one more question, and how many of the oldest turns are not in it, to leave room for the answer.

    What is too long even without any is returned all the same: `LLM.stream` refuses it with the figures.
    """
    room = llm.max_context - params.max_new_tokens
    for skip in range(conversation.num_turns + 1):
        ids = llm.chat_prompt(conversation.asked(question, skip=skip), enable_thinking=enable_thinking)
        if len(ids) <= room:
            break
    return ids, skip
