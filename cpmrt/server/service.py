"""The service of one model: it turns requests into token ids for the engine, and prepares their answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cpmrt import LLM, __version__
from cpmrt.engine import Request as EngineRequest
from cpmrt.engine.checks import check_prompt
from cpmrt.errors import CpmrtError, RequestError, of_each
from cpmrt.installation import missing_packages
from cpmrt.server.answer_form import may_need_form
from cpmrt.server.answers import Answer, AnswerFormat, ChatAnswer, CompletionAnswer, OpenAIFormat
from cpmrt.server.best_of import BestOf
from cpmrt.server.chat_text import ChatText
from cpmrt.server.engine_thread import EngineThread
from cpmrt.server.errors import ApiError, invalid, naming, shutting_down, unsupported
from cpmrt.server.fill_in_middle import fill_prompt
from cpmrt.server.hosts import is_loopback
from cpmrt.server.json_body import parse_object
from cpmrt.server.metrics import Metrics
from cpmrt.server.prompt_scores import ScoredPrompt
from cpmrt.server.prompt_work import PromptWorkers
from cpmrt.server.responses_answer import ResponsesFormat
from cpmrt.server.responses_request import CHAT_NAMES, chat_of
from cpmrt.server.running_usage import RunningUsageFormat
from cpmrt.server.schema import ChatRequest, Wanted, read_chat, read_completion
from cpmrt.server.token_logprobs import ChatLogprobs, CompletionLogprobs, TokenTexts
from cpmrt.sharing.jobs import Ended
from cpmrt.text import Tokenizer
from cpmrt.text.markers import marker_ids
from cpmrt.text.streaming import stop_automaton
from cpmrt.text.thinking import opened_thought
from cpmrt.tool_use.calls import schemas_of
from cpmrt.tool_use.formats import Format
from cpmrt.tool_use.grammars import format_of
from cpmrt.yielding_json import LONG

T = TypeVar("T")


@dataclass(frozen=True)
class ServerSettings:
    """The options of `cpmrt serve`, beyond the model's own. `port` 0 takes a free one.

    `max_body` is in bytes; None: 16 for each token of the context, at least 1 MiB. `grace` is how many seconds requests
    may go on after SIGTERM. `log_prompts` writes prompts into the log. `allowed_hosts` are the names, besides loopback
    and `host`, that the `Host` of a request may have; if there are any, every request is checked. `aliases` are more
    names of the model. Pages of `cors_origins` ("*": any) may use the API from a browser. With `ssl_certfile` the
    server speaks HTTPS.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_queue: int = 64
    max_body: int | None = None
    grace: float = 30.0
    log_prompts: bool = False
    allowed_hosts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names by which requests may call the model."""
        return (self.model_name, *self.aliases)

    @property
    def is_loopback(self) -> bool:
        """True if nobody outside this machine can connect."""
        return is_loopback(self.host)

    def body_limit(self, max_context: int) -> int:
        """Return the most bytes that a request's body may have."""
        return self.max_body if self.max_body is not None else max(2**20, 16 * max_context)


@dataclass(frozen=True)
class Prepared:
    """A request that the engine can take, and the `format` that its answer has. The log knows it by its `id`.

    `requests` has one for each choice; `wanted.num_choices` in a row share a prompt. `shown_ids` are the special tokens
    that the text keeps, for the answer to find. The tokens of `scored` prompts get log-probabilities before all else.
    """

    id: str
    requests: list[EngineRequest]
    wanted: Wanted
    format: AnswerFormat
    shown_ids: frozenset[int] = frozenset()
    scored: Sequence[ScoredPrompt] = ()
    generates: bool = True
    """Whether tokens are wanted besides those of the prompts."""

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the prompts, each of which counts once however many choices it has."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self.wanted.num_choices])


class Service:
    """Prepares requests to one model. Needs a running event loop."""

    def __init__(self, settings: ServerSettings, load: Callable[[], LLM]):
        self.settings = settings
        self.metrics = Metrics(settings.model_name, settings.max_queue)
        self.engine = EngineThread(
            partial(_prepared, load),
            max_queue=settings.max_queue,
            on_tokens=self.metrics.add_tokens,
            on_ended=self.metrics.add_ended,
        )
        self.started = int(time.time())
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when no request may go on."""
        self.prompt_workers = PromptWorkers(settings.max_queue, self.over)
        self._workers = ThreadPoolExecutor(2, "cpmrt-prepare")
        # One thread: each that computes in Python makes the event loop wait longer for its turn.
        self._long_workers = ThreadPoolExecutor(1, "cpmrt-prepare-long")
        self._form_workers = ThreadPoolExecutor(2, "cpmrt-prepare-form")

    async def in_thread(self, call: Callable[[], T], num_bytes: int = 0) -> T:
        """Return what a call gives in a worker thread; those about a body of many bytes do not hold up the others.

        Raises ApiError 503 if the server ends before the call does.
        """
        return await self._in_thread_of(self._workers if num_bytes < LONG else self._long_workers, call)

    async def prepared(self, prepare: Callable[[dict[str, Any]], Prepared], body: bytes) -> Prepared:
        """Return what `prepare` makes of a body. While forms compile, only requests that need one wait for each other.

        Raises as `in_thread` does.
        """
        kept = list[dict[str, Any]]()  # taken out by the thread that is to free it, not by the event loop

        def begun() -> Prepared | None:
            fields = parse_object(body)
            if not may_need_form(fields):
                return prepare(fields)
            kept.append(fields)
            return None

        done = await self.in_thread(begun, len(body))
        if done is not None:
            return done
        return await self._in_thread_of(self._form_workers, lambda: prepare(kept.pop()))

    async def _in_thread_of(self, workers: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(workers, _outcome, call)
        await asyncio.wait((running, self.over), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise shutting_down()
        result = running.result()
        if isinstance(result, _Refusal):
            raise result.error
        return result

    def prepare_chat(self, body: dict[str, Any]) -> Prepared:
        """Check a chat, render and tokenize it. Raises ApiError, CpmrtError."""
        chat = read_chat(body, self.settings.model_names)
        wanted, requests, texts = self._chat(chat)
        logprobs = list[ChatLogprobs]()
        if wanted.logprobs is not None:
            tokens, end_ids = TokenTexts(self.engine.llm.tokenizer), frozenset(requests[0].stop_token_ids)
            logprobs = [ChatLogprobs(tokens, end_ids, wanted.logprobs) for _ in texts]
        answer = ChatAnswer(texts, logprobs)
        head = self._head("chatcmpl", "chat.completion.chunk" if wanted.streams else "chat.completion")
        return self._prepared(head, requests, wanted, answer, marker_ids(self.engine.llm.tokenizer))

    def prepare_response(self, body: dict[str, Any]) -> Prepared:
        """Check a request of the Responses API, render and tokenize it. Raises ApiError, CpmrtError."""
        told = chat_of(body)
        with naming(CHAT_NAMES):
            chat = read_chat(told, self.settings.model_names)
            wanted, requests, (text,) = self._chat(chat)
        response_id = f"resp_{secrets.token_hex(12)}"
        answer = ResponsesFormat(response_id, self.settings.model_name, body, text)
        return Prepared(response_id, requests, wanted, answer, marker_ids(self.engine.llm.tokenizer))

    def _chat(self, chat: ChatRequest) -> tuple[Wanted, list[EngineRequest], list[ChatText]]:
        """Return what is wanted of a chat, and for each choice its request and the `ChatText` that splits its text."""
        llm = self.engine.llm
        check_tools(llm, chat.tools, chat.called)
        wanted = calling(
            llm, chat.wanted, chat.tools, chat.called, one_call=chat.one_call, allowed=chat.allowed
        )
        ids = llm.chat_prompt(
            chat.messages,
            tools=chat.tools or None,
            allow_special_tokens=chat.allow_special_tokens,
            template_kwargs=chat.template_kwargs,
        )
        self.engine.check_capacity(wanted.num_choices, "n")
        requests = choices_of(llm, ids, wanted)
        thought_end = opened_thought(llm.tokenizer, ids)
        schemas = schemas_of(chat.tools, chat.allowed) if chat.tools else None
        bound = bound_format(llm, wanted, chat.called)
        make_text = partial(
            ChatText, thought_end, schemas, one_call=chat.one_call, bound=bound, calls_only=bool(chat.called),
            grows=wanted.streams, only_known=bool(chat.allowed),
        )  # fmt: skip
        return wanted, requests, [make_text() for _ in range(wanted.num_choices)]

    def prepare_completion(self, body: dict[str, Any]) -> Prepared:
        """Check a completion and tokenize its prompts. Raises ApiError, CpmrtError."""
        llm = self.engine.llm
        completion = read_completion(body, self.settings.model_names)
        wanted = completion.wanted
        requests: list[EngineRequest] = []
        echoes: list[str] = []
        num_prompts = len(completion.prompts)
        self.engine.check_capacity(num_prompts * wanted.num_choices, "prompt" if num_prompts > 1 else "n")
        asked = [_filling(llm.tokenizer, prompt, completion.suffix) for prompt in completion.prompts]
        for prompt, ids in zip(completion.prompts, _checked(llm, asked), strict=True):
            requests += choices_of(llm, ids, wanted, len(requests))
            echoes += [_text_of(prompt, llm.tokenizer) if completion.echo else ""] * wanted.num_choices
        logprobs, scored = list[CompletionLogprobs](), list[ScoredPrompt]()
        if wanted.logprobs is not None:
            # With an echo every token has its place in the lists, end tokens too: clients count them.
            end_ids = frozenset() if completion.echo else frozenset(requests[0].stop_token_ids)
            tokens = TokenTexts(llm.tokenizer)
            logprobs = [
                CompletionLogprobs(tokens, end_ids, wanted.logprobs, request.prompt_ids, echo)
                for request, echo in zip(requests, echoes, strict=True)
            ]
            scored = _scored(llm, requests, wanted, logprobs) if completion.echo else []
        kept, tried = completion.num_kept, wanted.num_choices
        answer = CompletionAnswer(echoes, logprobs) if kept == tried else BestOf(kept, tried, echoes, logprobs)
        for choice in () if completion.generates else range(len(requests)):
            answer.add((choice, Ended("length")))
        prepared = self._prepared(self._head("cmpl", "text_completion"), requests, wanted, answer)
        return replace(prepared, scored=scored, generates=completion.generates)

    def end_all(self) -> None:
        """End every request that still runs or whose body is still coming."""
        if not self.over.done():
            self.over.set_result(None)
        self.engine.cancel_all()

    def close(self) -> None:
        for workers in (self._workers, self._long_workers, self._form_workers):
            workers.shutdown(wait=False, cancel_futures=True)
        self.prompt_workers.close()

    def _prepared(
        self,
        head: dict[str, Any],
        requests: list[EngineRequest],
        wanted: Wanted,
        answer: Answer,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Prepared:
        prepared = Prepared(
            head["id"], requests, wanted, OpenAIFormat(head, answer, include_usage=wanted.include_usage), shown_ids
        )
        if not wanted.running_usage:
            return prepared
        counting = RunningUsageFormat(
            head, answer, include_usage=wanted.include_usage, num_prompt_tokens=prepared.num_prompt_tokens
        )
        return replace(prepared, format=counting)

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.settings.model_name,
            "system_fingerprint": f"cpmrt-{__version__}",
        }


def _prepared(load: Callable[[], LLM]) -> LLM:
    """Load a model, and build in advance what the first request that needs it would build while all others wait."""
    llm = load()
    if llm.tokenizer is not None:
        llm.tokenizer.control_tokens.prepare()
        if not missing_packages("grammar"):
            with suppress(RequestError):  # a model without an end token; a request for a form will hear of it
                llm.maker.forms.grammars.prepare()
    return llm


@dataclass(frozen=True)
class _Refusal:
    error: Exception


def _outcome(call: Callable[[], T]) -> T | _Refusal:
    """Make a call, and return the error that refuses a request without its traceback.

    The traceback would keep all that was made of a large request, to be freed by the event loop.
    """
    try:
        return call()
    except (ApiError, CpmrtError) as error:
        error.__context__ = error.__cause__ = None
        return _Refusal(error.with_traceback(None))


def check_tools(llm: LLM, tools: Sequence[Any], called: Sequence[str]) -> None:
    """Raise ApiError if the model may choose to call tools that its chat template has no place for."""
    if not llm.maker.may_offer(tools, called):
        instead = "let tool_choice say which one must be called, or leave them out"
        raise unsupported("tools", f"the chat template of this model has none; {instead}")


def calling(
    llm: LLM, wanted: Wanted, tools: Sequence[Mapping[str, Any]], called: tuple[str, ...], *, one_call: bool,
    allowed: tuple[str, ...] = (),
) -> Wanted:  # fmt: skip
    """Return `wanted` with the settings of `JobMaker.calling`, which make answers call tools.

    Raises ApiError for a form beside a call that must be made, RequestError.
    """
    if called and wanted.form_names:
        (name,) = wanted.form_names.values()
        problem = "not together with a tool_choice by which a tool must be called; leave one of the two out"
        raise invalid(name.partition(".")[0], problem)
    with naming(wanted.form_names):
        sampling = llm.maker.calling(wanted.sampling, tools, called, one_call=one_call, allowed=allowed)
    return replace(wanted, sampling=sampling)


def bound_format(llm: LLM, wanted: Wanted, called: Sequence[str]) -> Format | None:
    """Return the format of calls if the settings of `calling` have a grammar that enforces it, else None."""
    is_bound = called or wanted.sampling.grammar_trigger is not None
    return format_of(llm.chat_template) if is_bound else None


def _checked(llm: LLM, prompts: Sequence[str | list[int]]) -> Sequence[str | Sequence[int]]:
    """Return the prompts; several as token ids, whose errors say which one they are about."""

    def ids_of(prompt: str | list[int]) -> Sequence[int]:
        ids = llm.maker.token_ids(prompt)
        check_prompt(ids, llm.max_context)
        return ids

    return of_each("prompt", prompts, ids_of) if len(prompts) > 1 else prompts


def choices_of(
    llm: LLM, prompt: str | Sequence[int], wanted: Wanted, first_choice: int = 0, num_begun: int = 0
) -> list[EngineRequest]:
    """Return the requests of the choices of a prompt, numbered from `first_choice` on.

    The last `num_begun` tokens of the prompt belong to the answer already.
    """
    with naming(wanted.form_names):
        request = llm.maker.request(prompt, wanted.sampling, num_begun)
    if wanted.sampling.stop:
        stop_automaton(wanted.sampling.stop)  # built here, so that the engine's thread finds it
    # Without room for one token the engine refuses the request, with figures.
    room = max(1, llm.max_context - len(request.prompt_ids))
    request = replace(request, max_new_tokens=min(request.max_new_tokens, room))
    choices = range(first_choice, first_choice + wanted.num_choices)
    return [replace(request, seed=wanted.seed(choice)) for choice in choices]


def _scored(
    llm: LLM, requests: list[EngineRequest], wanted: Wanted, logprobs: list[CompletionLogprobs]
) -> list[ScoredPrompt]:
    """Return the prompts of these requests with the writers of their choices."""
    assert wanted.logprobs is not None
    each, starts = wanted.num_choices, range(0, len(requests), wanted.num_choices)
    return [
        ScoredPrompt(requests[at].prompt_ids, wanted.logprobs, logprobs[at : at + each], llm.max_context)
        for at in starts
    ]


def _filling(tokenizer: Tokenizer | None, prompt: str | list[int], suffix: str) -> str | list[int]:
    """Return the prompt that a model continues: with a suffix, one that asks for the text between the two."""
    if not suffix:
        return prompt
    assert isinstance(prompt, str)
    return fill_prompt(tokenizer, prompt, suffix, param="suffix")


def _text_of(prompt: str | list[int], tokenizer: Tokenizer | None) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt) if tokenizer else ""
