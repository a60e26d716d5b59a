"""Answers to both kinds of completion, as one JSON object or as server-sent events with the chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from cpmrt.executor import TokenLogprobs
from cpmrt.generation import Piece
from cpmrt.server.chat_text import ChatText, Delta, message_of
from cpmrt.server.engine_thread import Ended, Item
from cpmrt.server.errors import ApiError
from cpmrt.text import Tokenizer

DONE = "data: [DONE]\n\n"
_LOWEST = -9999.0
"""The number that the API writes for minus infinity, which JSON lacks."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def to_bytes(text: str) -> bytes:
    """Encode as UTF-8; half of a surrogate pair, which only a tool call can hold, becomes a question mark."""
    return text.encode("utf-8", "replace")


def event(value: dict[str, Any]) -> str:
    """Return one server-sent event with a JSON object."""
    return f"data: {_encode(value)}\n\n"


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

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the answer that all items make."""


class Chunks:
    """Writes the events of one stream; what never changes is formatted once. All chunks begin with `head`."""

    def __init__(self, head: dict[str, Any], *, include_usage: bool):
        self._head = head
        self._before = "data: " + _encode(head)[:-1] + ',"choices":[{"index":'
        self._after = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"
        self._plain_after = ',"logprobs":null,"finish_reason":null' + self._after

    def delta(self, choice: int, name: str, value: Any) -> str:
        """Return a chunk of one choice with nothing but `name` ("delta" or "text") and its value."""
        return f'{self._before}{choice},"{name}":{_encode(value)}{self._plain_after}'

    def full(self, choice: int, name: str, value: Any, logprobs: Any, finish_reason: str | None) -> str:
        """Return a chunk with log-probabilities or the reason of the end."""
        fields = f'"{name}":{_encode(value)},"logprobs":{_encode(logprobs)},"finish_reason":{_encode(finish_reason)}'
        return f"{self._before}{choice},{fields}{self._after}"

    def usage(self, usage: dict[str, Any]) -> str:
        """Return the last chunk, which has no choice."""
        return event({**self._head, "choices": [], "usage": usage})


class LogprobWriter:
    """Writes log-probabilities in the two shapes of the API. Like the text they leave out the end tokens, `end_ids`.

    `count` is the number of most likely tokens that were asked for.
    """

    def __init__(self, tokenizer: Tokenizer | None, end_ids: Iterable[int], count: int):
        self._tokenizer, self._end_ids, self._count = tokenizer, frozenset(end_ids), count
        self._texts: dict[int, tuple[str, list[int]]] = {}

    def chat(self, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of a chat's choice."""
        entries = [
            {
                **self._chat_entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._chat_entry(*pair) for pair in entry.top[: self._count]],
            }
            for entry in logprobs
            if entry.token_id not in self._end_ids
        ]
        return {"content": entries, "refusal": None}

    def completion(self, logprobs: Iterable[TokenLogprobs], offset: int) -> dict[str, Any]:
        """Return the `logprobs` of a completion's choice; `offset` characters of text come before the first token."""
        kept = [entry for entry in logprobs if entry.token_id not in self._end_ids]
        tokens = [self._text(entry.token_id)[0] for entry in kept]
        tops = [{self._text(token)[0]: _finite(lp) for token, lp in entry.top[: self._count]} for entry in kept]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in kept],
            "top_logprobs": tops if self._count else None,
            "text_offset": [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))],
        }

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}

    def _text(self, token_id: int) -> tuple[str, list[int]]:
        """Return the text and the bytes of a token, and keep them."""
        if token_id not in self._texts:
            self._texts[token_id] = self._read(token_id)
        return self._texts[token_id]

    def _read(self, token_id: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            return f"token_id:{token_id}", []
        raw = self._tokenizer.token_bytes(token_id)
        if not raw:
            raw = self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return raw.decode("utf-8", "replace"), list(raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


class ChatAnswer:
    """The choices of a chat: streamed by `begin` and `stream`, or collected by `add` and written by `choices`.

    `logprobs` is None where they were not asked for.
    """

    def __init__(self, texts: Sequence[ChatText], logprobs: LogprobWriter | None):
        self._texts, self._logprobs = texts, logprobs
        self._deltas: list[list[Delta]] = [[] for _ in texts]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in texts]
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
            return rest + chunks.full(choice, "delta", {}, None, _reason(part, text))
        deltas = text.push(part.text) if part.text else []
        if self._logprobs is None or not part.logprobs:
            return "".join([chunks.delta(choice, "delta", delta) for delta in deltas])
        first, *others = deltas or [{"content": ""}]
        begun = chunks.full(choice, "delta", first, self._logprobs.chat(part.logprobs), None)
        return begun + "".join([chunks.delta(choice, "delta", delta) for delta in others])

    def add(self, item: Item) -> None:
        """Take in an item of an answer that is not streamed."""
        choice, part = item
        text = self._texts[choice]
        if isinstance(part, Piece):
            self._deltas[choice] += text.push(part.text)
            self._entries[choice] += part.logprobs
        else:
            self._deltas[choice] += text.flush()
            self._reasons[choice] = _reason(part, text)

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": choice,
                "message": message_of(self._deltas[choice]),
                "logprobs": self._logprobs and self._logprobs.chat(self._entries[choice]),
                "finish_reason": reason,
            }
            for choice, reason in enumerate(self._reasons)
        ]


def _reason(ended: Ended, text: ChatText) -> str:
    return "tool_calls" if text.has_calls and ended.reason == "stop" else ended.reason


class CompletionAnswer:
    """The choices of a plain completion, with the methods of `ChatAnswer`. `echoes` are put before the texts."""

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
                "text": "".join(text),
                "logprobs": self._logprobs and self._logprobs.completion(entries, len(echo)),
                "finish_reason": reason,
            }
            for choice, (text, entries, echo, reason) in enumerate(
                zip(self._texts, self._entries, self._echoes, self._reasons, strict=True)
            )
        ]


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

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": self._answer.choices(), "usage": usage}
