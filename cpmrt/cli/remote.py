"""The model of an OpenAI-compatible server, for `cpmrt chat --url`. Uses the standard library's HTTP client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from cpmrt.cli.context_room import PromptEstimate, room_for_prompt
from cpmrt.cli.conversation import Conversation, Message, Part
from cpmrt.config import SamplingParams
from cpmrt.engine import GenerationStats
from cpmrt.errors import RequestError, quoted
from cpmrt.generation import Completion

_CONNECT_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 600.0
_SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "stop_token_ids", "ignore_eos",
    "loop_repeats", "loop_penalty", "max_thinking_tokens",
)  # fmt: skip
_OUTPUTS = {"regex": "regex", "grammar": "grammar", "choices": "choice"}
"""Kind of form -> its name in the field `structured_outputs` of vLLM and of `cpmrt serve`."""


class ServerError(RequestError):
    """The server cannot be reached, refused a request, or broke off. `code` is the error code of the API, if any."""

    def __init__(self, what: str, code: str | None = None, *, fix: str | None = None):
        super().__init__(what, fix=fix)
        self.code = code


class RemoteModel:
    """Chats through the server at `url` (with or without /v1).

    Raises RequestError for an invalid `url`, and for sampling that the API has no field for.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        params: SamplingParams,
        enable_thinking: bool | None,
        allow_special_tokens: bool = False,
    ):
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._port = parts.port
        except ValueError as error:
            raise RequestError(f"--url: {error}") from error
        host = parts.hostname or ""
        if parts.scheme not in ("http", "https") or not re.fullmatch(r"[^\x00-\x20\x7f]+", host):
            raise RequestError("--url", expected="http://HOST:PORT", actual=quoted(url))
        if "@" in parts.netloc:  # it would not be sent, but shown wherever the server is named
            raise RequestError("--url holds a user or a password", fix="leave them out; a key goes into CPMRT_API_KEY")
        if params.grammar_trigger is not None:
            fix = "leave it out, or chat with a model here, without --url"
            raise RequestError("--grammar-trigger cannot be sent to a server, whose API has no field for it", fix=fix)
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._where = host, f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.params, self.enable_thinking = params, enable_thinking
        self._allow_special_tokens = allow_special_tokens
        self._model: str | None = None
        self._context: object = None
        self._estimate = PromptEstimate()
        self._last: tuple[list[Message], RemoteAnswer] | None = None
        """The messages that were asked last, and their answer."""

    def check(self, conversation: Conversation) -> None:
        """Raise ServerError unless the server answers and has a model."""
        with self._send("GET", "/models") as response:
            model = _first(_parsed(_content(response, self._where)).get("data"))
        self._model, self._context = model.get("id"), model.get("max_model_len")
        if not isinstance(self._model, str):
            raise ServerError(f"{self._where} names no model at {self._path}/models", fix="check --url")

    def describe(self) -> list[str]:
        """Return one line: the name of the model, its server and its context."""
        context = f", context {self._context:,} tokens" if isinstance(self._context, int) else ""
        return [f"{self._model} at {self._where}{context}"]

    def usage(self, conversation: Conversation) -> str:
        """Return "": only the server can count the tokens."""
        return ""

    def open(self, conversation: Conversation, question: str) -> tuple[RemoteAnswer, int]:
        """Begin the answer to one more question; also return how many of the oldest turns had to be left out."""
        skip = self._num_too_many(conversation, question)
        while True:
            try:
                messages = conversation.asked(question, skip=skip)
                answer = self._ask(messages)
                self._last = (messages, answer)
                return answer, skip
            except ServerError as error:
                if error.code != "context_length_exceeded" or skip == conversation.num_turns:
                    raise
                skip += 1

    def _num_too_many(self, conversation: Conversation, question: str) -> int:
        """Return how many of the oldest turns seem to leave too little room for an answer."""
        if self._last is not None:
            messages, answer = self._last
            prompt_tokens = answer.completion.stats.prompt_tokens
            if prompt_tokens:  # 0 if the answer was stopped before the server sent its counts
                self._estimate.learn(messages, prompt_tokens)
        if not isinstance(self._context, int):
            return 0
        room, most = room_for_prompt(self._context, self.params.max_new_tokens), conversation.num_turns
        skips = (n for n in range(most) if self._estimate.tokens(conversation.asked(question, skip=n)) <= room)
        return next(skips, most)

    def _ask(self, messages: list[Message]) -> RemoteAnswer:
        fields = {**_body_fields(self.params, self.enable_thinking), "model": self._model, "messages": messages}
        if self._allow_special_tokens:
            fields["allow_special_tokens"] = True
        body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}})
        asked_at = perf_counter()
        return RemoteAnswer(self._send("POST", "/chat/completions", body.encode()), self._where, asked_at)

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
            raise ServerError(f"{self._where} cannot be reached: {error}", fix="check --url") from error
        except BaseException:
            connection.close()
            raise
        if response.status != 200:
            with response:
                raise _refusal(response, self._where)
        return response


class RemoteAnswer:
    """An answer of a server; leaving its `with` block closes the connection, which makes the server cancel the request.

    `asked_at` is `perf_counter()` before the request was sent: the time of the response would be too late, as a server
    may hold back even the status until it has the first token.
    """

    def __init__(self, response: HTTPResponse, where: str, asked_at: float):
        self._response, self._where = response, where
        self._texts: list[str] = []
        self._finish_reason = "cancelled"
        self._asked_at, self._began_at, self._ended_at = asked_at, 0.0, 0.0
        self._usage: dict[str, Any] = {}

    def __enter__(self) -> RemoteAnswer:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            self._response.close()

    def __iter__(self) -> Iterator[Part]:
        for event in self._events():
            if event.get("error"):
                raise ServerError(str(_told(event, "message") or event["error"]), _told(event, "code"))
            self._usage = _object(event.get("usage")) or self._usage
            choice = _first(event.get("choices"))
            delta = _object(choice.get("delta"))
            self._ended_at = perf_counter()
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):  # vLLM has the second since 2026
                self._began_at = self._began_at or self._ended_at
                yield Part(str(thought), is_thought=True)
            if text := delta.get("content"):
                self._began_at = self._began_at or self._ended_at
                self._texts.append(str(text))
                yield Part(str(text))
            self._finish_reason = str(choice.get("finish_reason") or self._finish_reason)

    @property
    def text(self) -> str:
        """The text that has come so far, without the thoughts."""
        return "".join(self._texts)

    @property
    def completion(self) -> Completion:
        """The answer so far. The server sends the token counts at the end; the times are measured here."""
        began_at = self._began_at or self._ended_at  # without any text the whole time counts as waiting
        stats = GenerationStats(
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            new_tokens=_count(self._usage.get("completion_tokens")),
            prefill_s=max(0.0, began_at - self._asked_at),
            decode_s=max(0.0, self._ended_at - began_at),
        )
        return Completion(self.text, (), self._finish_reason, (), stats)

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            for line in self._response:
                name, _, value = line.partition(b":")
                if name == b"data" and value.strip() == b"[DONE]":
                    return
                if name == b"data":
                    yield _parsed(value)
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self._where} broke off: {error}") from error
        raise ServerError(f"{self._where} broke off in the middle of the answer")


def _body_fields(params: SamplingParams, enable_thinking: bool | None) -> dict[str, Any]:
    """Return the fields of a request that were set; those left out are up to the server."""
    fields: dict[str, Any] = {name: getattr(params, name) for name in _SAMPLING_FIELDS}
    fields |= {"max_tokens": params.max_new_tokens, "stop": list(params.stop), "seed": params.seed}
    fields["logit_bias"] = dict(params.logit_bias)  # json.dumps turns the integer keys into strings
    fields = {name: value for name, value in fields.items() if value is not None and value not in ((), [], {})}
    if enable_thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": enable_thinking}
    return fields | _form_fields(params)


def _form_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the field that asks for a form: OpenAI's `response_format` for a schema, vLLM's field for other forms."""
    form = params.form
    if form is None:
        return {}
    if form.kind != "json_schema":
        return {"structured_outputs": {_OUTPUTS[form.kind]: params.choices or form.text}}
    schema = json.loads(form.text)
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}  # true and false are schemas too, but the field takes only objects
    described = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _refusal(response: HTTPResponse, where: str) -> ServerError:
    told = _parsed(_content(response, where))
    message = str(_told(told, "message") or f"the server answers with status {response.status}")
    return ServerError(message, _told(told, "code"))


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        return _object(json.loads(raw))
    except (ValueError, RecursionError):
        return {}


def _content(response: HTTPResponse, where: str) -> bytes:
    """Return the body of a response, at most 16 MiB of it. Raises ServerError if the server breaks off."""
    try:
        return response.read(2**24)
    except (OSError, HTTPException) as error:
        raise ServerError(f"{where} broke off: {error}") from error


def _object(value: object) -> dict[str, Any]:
    """Return a value if it is a JSON object, {} for anything else."""
    return value if isinstance(value, dict) else {}


def _first(value: object) -> dict[str, Any]:
    """Return the first object of an array, {} if there is none."""
    return _object(value[0]) if isinstance(value, list) and value else {}


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _told(value: dict[str, Any], key: str) -> Any:
    """Return one field of the error object in a response; None if there is none."""
    error = value.get("error")
    return error.get(key) if isinstance(error, dict) else None
