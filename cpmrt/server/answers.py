"""Answers of both kinds of completion, as one JSON object or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cpmrt.executor import TokenLogprobs
from cpmrt.generation import Piece
from cpmrt.server.chat_text import ChatText, Delta, message_of
from cpmrt.server.chunks import Chunks
from cpmrt.server.mailbox import Ended, Item
from cpmrt.server.token_logprobs import LogprobWriter


class Answer(Protocol):
    """Turns the items of an exchange into what the client gets."""

    def begin(self, chunks: Chunks) -> str:
        """The chunks before any text."""
        ...

    def stream(self, chunks: Chunks, item: Item) -> str:
        """The chunks of one item."""
        ...

    def add(self, item: Item) -> None:
        """Take in an item of an answer that is not streamed."""
        ...

    def choices(self) -> list[dict[str, Any]]:
        """`choices` of an answer that is not streamed."""
        ...


class ChatAnswer:
    """POST /v1/chat/completions. `logprobs` None: not asked for."""

    def __init__(self, texts: Sequence[ChatText], logprobs: LogprobWriter | None):
        self._texts, self._logprobs = texts, logprobs
        self._deltas: list[list[Delta]] = [[] for _ in texts]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in texts]
        self._reasons = [""] * len(texts)

    def begin(self, chunks: Chunks) -> str:
        role = {"role": "assistant", "content": ""}
        return "".join(chunks.delta(choice, "delta", role) for choice in range(len(self._texts)))

    def stream(self, chunks: Chunks, item: Item) -> str:
        choice, part = item
        text = self._texts[choice]
        if isinstance(part, Ended):
            rest = "".join([chunks.delta(choice, "delta", delta) for delta in text.flush()])
            return rest + chunks.full(choice, "delta", {}, None, _reason(part, text.has_calls))
        deltas = text.push(part.text) if part.text else []
        if self._logprobs is None or not part.logprobs:
            return "".join([chunks.delta(choice, "delta", delta) for delta in deltas])
        first, *others = deltas or [{"content": ""}]
        entries = {"content": self._logprobs.chat(part.logprobs), "refusal": None}
        begun = chunks.full(choice, "delta", first, entries, None)
        return begun + "".join([chunks.delta(choice, "delta", delta) for delta in others])

    def add(self, item: Item) -> None:
        choice, part = item
        text = self._texts[choice]
        if isinstance(part, Piece):
            self._deltas[choice] += text.push(part.text)
            self._entries[choice] += part.logprobs
        else:
            self._deltas[choice] += text.flush()
            self._reasons[choice] = _reason(part, text.has_calls)

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": choice,
                "message": message_of(self._deltas[choice]),
                "logprobs": self._written(self._entries[choice]),
                "finish_reason": reason,
            }
            for choice, reason in enumerate(self._reasons)
        ]

    def _written(self, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
        return None if self._logprobs is None else {"content": self._logprobs.chat(entries), "refusal": None}


class CompletionAnswer:
    """POST /v1/completions. `echoes` are what stands in front of each choice's text."""

    def __init__(self, echoes: Sequence[str], logprobs: LogprobWriter | None):
        self._echoes, self._logprobs = echoes, logprobs
        self._texts = [[echo] for echo in echoes]
        self._lengths = [len(echo) for echo in echoes]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in echoes]
        self._reasons = [""] * len(echoes)

    def begin(self, chunks: Chunks) -> str:
        return "".join([chunks.delta(choice, "text", echo) for choice, echo in enumerate(self._echoes) if echo])

    def stream(self, chunks: Chunks, item: Item) -> str:
        choice, part = item
        if isinstance(part, Ended):
            return chunks.full(choice, "text", "", None, part.reason)
        if self._logprobs is None or not part.logprobs:
            return chunks.delta(choice, "text", part.text) if part.text else ""
        written = self._logprobs.completion(part.logprobs, self._lengths[choice])
        self._lengths[choice] += sum(map(len, written["tokens"]))
        return chunks.full(choice, "text", part.text, written, None)

    def add(self, item: Item) -> None:
        choice, part = item
        if isinstance(part, Ended):
            self._reasons[choice] = part.reason
        else:
            self._texts[choice].append(part.text)
            self._entries[choice] += part.logprobs

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": choice,
                "text": "".join(self._texts[choice]),
                "logprobs": self._written(choice),
                "finish_reason": reason,
            }
            for choice, reason in enumerate(self._reasons)
        ]

    def _written(self, choice: int) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return self._logprobs.completion(self._entries[choice], len(self._echoes[choice]))


def _reason(ended: Ended, has_calls: bool) -> str:
    return "tool_calls" if has_calls and ended.reason == "stop" else ended.reason
