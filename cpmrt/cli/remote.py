"""A model behind an OpenAI-compatible server, for `cpmrt chat --url`, by the standard library's HTTP client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from cpmrt.cli.conversation import Conversation, Message
from cpmrt.config import SamplingParams
from cpmrt.engine import GenerationStats
from cpmrt.errors import CpmrtError, RequestError
from cpmrt.generation import Completion, Piece

_CONNECT_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 600.0
_SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "stop_token_ids", "ignore_eos",
    "loop_repeats", "loop_penalty", "max_thinking_tokens",
)  # fmt: skip


class ServerError(RequestError):
    """The server refused a request, or broke off. `code` is the API's."""

    def __init__(self, what: str, code: str | None = None):
        super().__init__(what)
        self.code = code


class RemoteModel:
    """Chats through the server at `url` (with or without /v1)."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        params: SamplingParams,
        enable_thinking: bool | None,
        allow_special_tokens: bool = False,
    ):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError("--url", expected="http://HOST:PORT", actual=repr(url)[:100])
        try:
            self._port = parts.port
        except ValueError as error:
            raise RequestError(f"--url: {error}") from error
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._where = parts.hostname, f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fields = _body_fields(params, enable_thinking)
        if allow_special_tokens:
            self._fields["allow_special_tokens"] = True

    def check(self, conversation: Conversation) -> None:
        """Raise CpmrtError unless the server answers and has a model."""
        with self._send("GET", "/models") as response:
            models = _parsed(response.read()).get("data") or [{}]
        self._fields["model"] = models[0].get("id")

    def open(self, conversation: Conversation, question: str) -> tuple[RemoteStream, int]:
        """Begin the answer to one more question; also return how many of the oldest turns had to be left out of it."""
        skip = 0
        while True:
            try:
                return self._ask(conversation.asked(question, skip=skip)), skip
            except ServerError as error:
                if error.code != "context_length_exceeded" or skip == conversation.num_turns:
                    raise
                skip += 1

    def _ask(self, messages: list[Message]) -> RemoteStream:
        body = json.dumps({**self._fields, "messages": messages, "stream": True})
        return RemoteStream(self._send("POST", "/chat/completions", body.encode()), self._where)

    def _send(self, method: str, path: str, body: bytes | None = None) -> HTTPResponse:
        connection = self._kind(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_TIMEOUT_S)
            # With this header, closing the response closes the connection too.
            connection.request(method, self._path + path, body, {**self._headers, "Connection": "close"})
            response = connection.getresponse()
        except (OSError, HTTPException, ValueError) as error:
            connection.close()
            raise CpmrtError(f"{self._where} cannot be reached: {error}", fix="check --url") from error
        except BaseException:
            connection.close()
            raise
        if response.status != 200:
            with response:
                raise _refusal(response)
        return response


class RemoteStream(Iterator[Piece]):
    """Iterates over the pieces of an answer, thoughts among them; closing it makes the server cancel the request."""

    def __init__(self, response: HTTPResponse, where: str):
        self._response, self._where = response, where
        self._texts: list[str] = []
        self._finish_reason = "cancelled"
        self._pieces = self._run()

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def completion(self) -> Completion:
        """The answer so far, without its thoughts. The server tells neither tokens nor costs."""
        return Completion("".join(self._texts), (), self._finish_reason, (), GenerationStats())

    def close(self) -> None:
        """Close the connection. May be called again."""
        with suppress(OSError):
            self._response.close()

    def _run(self) -> Iterator[Piece]:
        was_thought = False
        for event in self._events():
            if "error" in event:
                raise ServerError(str(_told(event, "message") or ""), _told(event, "code"))
            choice = (event.get("choices") or [{}])[0]
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content"):
                was_thought = True
                yield Piece(str(thought))
            if text := delta.get("content"):
                self._texts.append(str(text))
                yield Piece("\n\n" * was_thought + str(text))
                was_thought = False
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            for line in self._response:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield _parsed(line[len(b"data: ") :])
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self._where} broke off: {error}") from error
        raise ServerError(f"{self._where} broke off in the middle of the answer")


def _body_fields(params: SamplingParams, enable_thinking: bool | None) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(params, name) for name in _SAMPLING_FIELDS}
    fields |= {"max_tokens": params.max_new_tokens, "stop": list(params.stop) or None}
    if enable_thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": enable_thinking}
    return fields


def _refusal(response: HTTPResponse) -> ServerError:
    told = _parsed(response.read(2**16))
    message = str(_told(told, "message") or f"the server answers with status {response.status}")
    return ServerError(message, _told(told, "code"))


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _told(value: dict[str, Any], key: str) -> Any:
    """Return an entry of the error that a server tells; None if there is none."""
    error = value.get("error")
    return error.get(key) if isinstance(error, dict) else None
