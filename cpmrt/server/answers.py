"""Answers to both kinds of completion, as one JSON object or as server-sent events with the chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from cpmrt.server.chat_text import ChatText, Message
from cpmrt.server.engine_thread import Item
from cpmrt.server.errors import ApiError
from cpmrt.server.token_logprobs import ChoiceLogprobs
from cpmrt.sharing.jobs import Ended

DONE = "data: [DONE]\n\n"
compact_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def to_bytes(text: str) -> bytes:
    """Encode as UTF-8; half of a surrogate pair, which only a tool call can hold, becomes a question mark."""
    return text.encode("utf-8", "replace")


def event(value: dict[str, Any]) -> str:
    """Return one server-sent event with a JSON object."""
    return f"data: {compact_json(value)}\n\n"


class AnswerFormat(Protocol):
    """Writes an answer in the shape of one API: as events while it comes (`begin`, `stream`, `end`), or as a whole.

    `usage` is that of `Exchange.usage`.
    """

    ping: str
    """An event that means nothing and keeps a connection open."""

    def begin(self) -> str:
        """Return the events before any text."""

    def stream(self, item: Item) -> str:
        """Return the events of one item."""

    def end(self, usage: dict[str, Any]) -> str:
        """Return the last events."""

    def failed(self, error: ApiError) -> str:
        """Return the event that ends an answer which has begun."""

    def add(self, item: Item) -> None:
        """Take in an item of an answer that is not streamed."""

    def whole(self, usage: dict[str, Any]) -> Iterator[str]:
        """Yield the JSON of the answer that all items make, in pieces that take little time each."""


class Chunks:
    """Writes the events of one stream; what never changes is formatted once. All chunks begin with `head`."""

    def __init__(self, head: dict[str, Any], *, include_usage: bool):
        self._head = head
        self._before = "data: " + compact_json(head)[:-1] + ',"choices":[{"index":'
        self._end_with('}],"usage":null}\n\n' if include_usage else "}]}\n\n")

    def carry(self, usage: dict[str, Any]) -> None:
        """Have the chunks of choices from now on carry this usage."""
        self._end_with(f'}}],"usage":{compact_json(usage)}}}\n\n')

    def _end_with(self, after: str) -> None:
        self._after = after
        self._plain_after = ',"logprobs":null,"finish_reason":null' + after

    def delta(self, choice: int, name: str, value: Any) -> str:
        """Return a chunk of one choice with nothing but `name` ("delta" or "text") and its value."""
        return f'{self._before}{choice},"{name}":{compact_json(value)}{self._plain_after}'

    def content(self, choice: int, text: str) -> str:
        """Return the chunk that `delta` makes of a chat's content, but faster: almost every token becomes one."""
        return f'{self._before}{choice},"delta":{{"content":{encode_basestring(text)}}}{self._plain_after}'

    def full(self, choice: int, name: str, value: Any, logprobs: str, finish_reason: str | None) -> str:
        """Return a chunk with log-probabilities, which are JSON already, or the reason of the end."""
        fields = f'"{name}":{compact_json(value)},"logprobs":{logprobs},"finish_reason":{compact_json(finish_reason)}'
        return f"{self._before}{choice},{fields}{self._after}"

    def usage(self, usage: dict[str, Any]) -> str:
        """Return the last chunk, which has no choice."""
        return event({**self._head, "choices": [], "usage": usage})


class ChatAnswer:
    """The choices of a chat: streamed by `begin` and `stream`, or collected by `add` and written by `choices`.

    `logprobs` are empty where they were not asked for.
    """

    def __init__(self, texts: Sequence[ChatText], logprobs: Sequence[ChoiceLogprobs]):
        self._texts, self._logprobs = texts, logprobs
        self._messages = [Message() for _ in texts]
        self._reasons = [""] * len(texts)

    def begin(self, chunks: Chunks) -> str:
        """Return the chunks before any text."""
        role = {"role": "assistant", "content": ""}
        return "".join(chunks.delta(choice, "delta", role) for choice in range(len(self._texts)))

    def stream(self, chunks: Chunks, item: Item) -> str:
        """Return the chunks of one item."""
        choice, part = item
        text = self._texts[choice]
        if isinstance(part, Ended):
            rest = "".join([chunks.delta(choice, "delta", delta) for delta in text.flush()])
            return rest + chunks.full(choice, "delta", {}, "null", _reason(part, text))
        deltas = text.push(part.text) if part.text else []
        if not self._logprobs or not part.logprobs:
            if len(deltas) == 1 and "content" in deltas[0]:
                return chunks.content(choice, deltas[0]["content"])
            return "".join([chunks.delta(choice, "delta", delta) for delta in deltas])
        first, *others = deltas or [{"content": ""}]
        self._logprobs[choice].add(part.logprobs)
        begun = chunks.full(choice, "delta", first, "".join(self._logprobs[choice].take()), None)
        return begun + "".join([chunks.delta(choice, "delta", delta) for delta in others])

    def add(self, item: Item) -> None:
        """Take in an item of an answer that is not streamed."""
        choice, part = item
        text, message = self._texts[choice], self._messages[choice]
        if isinstance(part, Ended):
            message.add(text.flush())
            self._reasons[choice] = _reason(part, text)
            return
        message.add(text.push(part.text))
        if self._logprobs:
            self._logprobs[choice].add(part.logprobs)

    def choices(self) -> Iterator[str]:
        """Yield the JSON of the choices, with commas between them."""
        for choice, reason in enumerate(self._reasons):
            logprobs = self._logprobs[choice].take() if self._logprobs else ("null",)
            yield from _choice(choice, "message", self._messages[choice].content(), logprobs, reason)


def _reason(ended: Ended, text: ChatText) -> str:
    return "tool_calls" if text.has_calls and ended.reason == "stop" else ended.reason


def _choice(index: int, name: str, value: Any, logprobs: Iterable[str], reason: str) -> Iterator[str]:
    yield f'{"," * bool(index)}{{"index":{index},"{name}":{compact_json(value)},"logprobs":'
    yield from logprobs
    yield f',"finish_reason":{compact_json(reason)}}}'


class CompletionAnswer:
    """The choices of a plain completion, with the methods of `ChatAnswer`. `echoes` are put before the texts."""

    def __init__(self, echoes: Sequence[str], logprobs: Sequence[ChoiceLogprobs]):
        self._echoes, self._logprobs = echoes, logprobs
        self._texts = [[echo] for echo in echoes]
        self._reasons = [""] * len(echoes)

    def begin(self, chunks: Chunks) -> str:
        return "".join([self._echo(chunks, choice, echo) for choice, echo in enumerate(self._echoes) if echo])

    def stream(self, chunks: Chunks, item: Item) -> str:
        choice, part = item
        if isinstance(part, Ended):
            return chunks.full(choice, "text", "", "null", part.reason)
        if not self._logprobs or not part.logprobs:
            return chunks.delta(choice, "text", part.text) if part.text else ""
        self._logprobs[choice].add(part.logprobs)
        return chunks.full(choice, "text", part.text, "".join(self._logprobs[choice].take()), None)

    def add(self, item: Item) -> None:
        choice, part = item
        if isinstance(part, Ended):
            self._reasons[choice] = part.reason
            return
        self._texts[choice].append(part.text)
        if self._logprobs:
            self._logprobs[choice].add(part.logprobs)

    def choices(self) -> Iterator[str]:
        for index, choice in enumerate(self.kept()):
            logprobs = self._logprobs[choice].take() if self._logprobs else ("null",)
            yield from _choice(index, "text", "".join(self._texts[choice]), logprobs, self._reasons[choice])

    def _echo(self, chunks: Chunks, choice: int, echo: str) -> str:
        if not self._logprobs:
            return chunks.delta(choice, "text", echo)
        return chunks.full(choice, "text", echo, "".join(self._logprobs[choice].take()), None)

    def kept(self) -> Sequence[int]:
        """Return the choices that are given, in their order."""
        return range(len(self._reasons))


Answer = ChatAnswer | CompletionAnswer


class OpenAIFormat:
    """Writes chats and plain completions. Both kinds of answer begin with `head`."""

    ping = ": ping\n\n"

    def __init__(self, head: dict[str, Any], answer: Answer, *, include_usage: bool):
        self._head, self._answer, self._include_usage = head, answer, include_usage
        self._chunks = Chunks(head, include_usage=include_usage)

    def begin(self) -> str:
        return self._answer.begin(self._chunks)

    def stream(self, item: Item) -> str:
        return self._answer.stream(self._chunks, item)

    def end(self, usage: dict[str, Any]) -> str:
        return (self._chunks.usage(usage) if self._include_usage else "") + DONE

    def failed(self, error: ApiError) -> str:
        return event(error.body())

    def add(self, item: Item) -> None:
        self._answer.add(item)

    def whole(self, usage: dict[str, Any]) -> Iterator[str]:
        yield compact_json(self._head)[:-1] + ',"choices":['
        yield from self._answer.choices()
        yield f'],"usage":{compact_json(usage)}}}'
