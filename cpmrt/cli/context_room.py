"""Estimates how much of a conversation fits the context beside its next answer, as the chat page of a server does."""

from __future__ import annotations

from collections.abc import Sequence

from cpmrt.cli.conversation import Message

_ANSWER_ROOM = 1024
"""Tokens of the context that are kept free for an answer that may go on until the context is full."""
_TYPICAL_TOKENS, _TYPICAL_CHARACTERS = 120, 300
"""An assumed text, added to what was counted, so that a short prompt does not decide the tokens per character."""


def room_for_prompt(context: int, max_new_tokens: int | None) -> int:
    """Return how many of the `context` tokens a prompt may take.

    The answer's share is `max_new_tokens`, or _ANSWER_ROOM without it, but at most a quarter of the context.
    """
    return context - min(max_new_tokens or _ANSWER_ROOM, context // 4)


class PromptEstimate:
    """Estimates the tokens of a prompt from the last prompt whose tokens a server has counted.

    Short prompts are mostly tokens of the template itself, so they say little about tokens per character.
    """

    def __init__(self) -> None:
        self._tokens = self._characters = 0

    def learn(self, messages: Sequence[Message], tokens: int) -> None:
        """Note that the prompt of these messages has so many tokens."""
        self._tokens, self._characters = tokens, _characters_of(messages)

    def tokens(self, messages: Sequence[Message]) -> float:
        """Return the tokens of the prompt of these messages, 0 as long as none was counted."""
        if not self._tokens:
            return 0
        each = (self._tokens + _TYPICAL_TOKENS) / (self._characters + _TYPICAL_CHARACTERS)
        return self._tokens + (_characters_of(messages) - self._characters) * each


def _characters_of(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)
