"""Checks the prompts, messages and settings that callers pass, and turns them into jobs for a shared engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from cpmrt.config import ModelConfig, SamplingDefaults, SamplingParams
from cpmrt.dtypes import F32
from cpmrt.engine import Engine, Request, ThinkingBudget, request_seed
from cpmrt.engine.checks import check_prompt
from cpmrt.errors import RequestError, of_each, quoted
from cpmrt.installation import missing_packages
from cpmrt.sharing.jobs import Generation, Reading
from cpmrt.sharing.reading_results import joined, pooled, scores
from cpmrt.text import ChatTemplate, ThoughtEnd, Tokenizer
from cpmrt.text.markers import marker_ids
from cpmrt.text.messages import checked_tools
from cpmrt.text.template_options import check_switch, template_variables
from cpmrt.text.thinking import closings, opened_thought, prompt_end_of
from cpmrt.tool_use.calls import schemas_of
from cpmrt.tool_use.tool_choice import ToolChoice, choice_by_name

if TYPE_CHECKING:
    from cpmrt.answer_forms import AnswerForms

TokenIds = Sequence[int] | NDArray[np.integer[Any]]
Prompt = str | TokenIds
"""Text, or token ids that are taken as they are."""
Prompts = list[str] | tuple[str, ...] | Sequence[TokenIds] | list[str | list[int]]
Message = Mapping[str, Any]
"""One message of a conversation: {"role": ..., "content": ...}."""
Tool = Mapping[str, Any]
"""A function as the OpenAI API describes it: {"type": "function", "function": {"name", "parameters", ...}}."""
Pooling = Literal["mean", "last"]

Numbers = Iterator[int]
"""Numbers of requests: the seed of a request without one is made of its number."""

TokensOf = Callable[[Sequence[Message]], list[int]]
_ChunkReader = Callable[[int, tuple[int, ...], tuple[int, ...]], Iterator[F32]]


@dataclass
class JobMaker:
    """Makes jobs for the model that `engine` runs, in any thread. Requests without a seed get one made of `seed`."""

    engine: Engine
    config: ModelConfig
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    sampling_defaults: SamplingDefaults
    seed: int
    on_chat: Callable[[Sequence[int], Sequence[Message], TokensOf], None] | None = None
    """Called with the token ids of each chat that is to be answered, its messages, and a function that gives the token
    ids of other messages under the same options."""
    _numbers: Numbers = field(default_factory=count)

    def numbers(self, prompts: Sized | None, params: SamplingParams | Sequence[SamplingParams] | None) -> Numbers:
        """Take numbers for requests that are made later and lack a seed: one request, or one for each of `prompts`.

        Taken in advance, they do not depend on which of several threads makes its requests first.
        """
        each = params if isinstance(params, (list, tuple)) else [params] * (1 if prompts is None else len(prompts))
        taken = [next(self._numbers) for own in each if getattr(own, "seed", None) is None]
        return chain(taken, self._numbers)

    def request(
        self, prompt: Prompt, params: SamplingParams, num_begun: int = 0, *, numbers: Numbers | None = None
    ) -> Request:
        """Return the engine's request for a prompt: token ids, sampling, length, end tokens and seed made definite.

        The last `num_begun` tokens of the prompt belong to the answer, which goes on behind them. A request without a
        seed takes the next of `numbers`, or without these the next of this object's own. Raises RequestError.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                "params", expected="SamplingParams", actual=type(params).__name__,
                fix="pass SamplingParams(temperature=..., max_new_tokens=...)",
            )  # fmt: skip
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer", fix="use stop_token_ids")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", dict(params.logit_bias))
        ids = self.token_ids(prompt)
        end_ids = () if params.ignore_eos else self._end_token_ids()
        seed = params.seed
        if seed is None:
            seed = request_seed(self.seed, next(self._numbers if numbers is None else numbers))
        own = self.sampling_defaults
        return Request(
            ids,
            params.with_defaults(own),
            seed % 2**64,
            tuple(sorted({*params.stop_token_ids, *end_ids})),
            # At least 1: without room for one token the engine itself refuses the request, with figures.
            params.max_new_tokens or max(1, self.engine.limits.max_context - len(ids)),
            tuple(params.stop),
            params.loop_repeats,
            own.loop_penalty if params.loop_penalty is None else params.loop_penalty,
            self._thinking_budget(ids, params, num_begun),
            **self._form(ids, params, num_begun),
        )

    def calling(
        self, params: SamplingParams, tools: Sequence[Tool], called: Sequence[str], *, one_call: bool = False,
        allowed: Sequence[str] = (),
    ) -> SamplingParams:  # fmt: skip
        """Return settings that make an answer call one or more of the tools named `called`; only one with `one_call`.

        If none is named the answer is free until it begins to call one of the tools (of those named `allowed`, if any
        are), and an answer with a JSON schema may be calls instead. Settings are returned unchanged where no grammar
        can bind the calls of a free answer: without llguidance, for an executor without masks, and for tools that no
        grammar can describe. The model may call such tools all the same, but nothing makes its calls valid. Raises
        RequestError.
        """
        if called and params.form is not None:
            raise RequestError("tool_choice", expected="no other form of the answer", actual=params.form.kind)
        is_free = not called and params.form is None
        if not called and (not tools or not (is_free or params.json_schema)):
            return params
        if is_free and (self.tokenizer is None or missing_packages("grammar") or not self.engine.limits.takes_masks):
            return params
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer", fix="leave out tool_choice")
        try:
            return self.forms.calling(params, tools, called or allowed, one_call=one_call, is_free=is_free)
        except RequestError:
            if is_free:
                return params
            raise

    def may_offer(self, tools: Sequence[Tool], called: Sequence[str]) -> bool:
        """Tell whether the model can call these tools: the template shows them, or a grammar forces `called`."""
        return not tools or bool(called) or self.chat_template is None or self.chat_template.takes_tools

    def choices(
        self, prompt: Prompt, params: SamplingParams | None, numbers: Numbers | None = None
    ) -> list[Generation]:
        """Return the `params.n` generations of a prompt, each with a seed of its own."""
        params = SamplingParams() if params is None else params
        request = self.request(prompt, params, numbers=numbers)
        others = (replace(request, seed=request_seed(request.seed, number)) for number in range(1, params.n))
        return [Generation(each) for each in (request, *others)]

    def only_choice(self, prompt: Prompt, params: SamplingParams | None, numbers: Numbers | None = None) -> Generation:
        """Return the one generation of a prompt. Raises RequestError if `params` ask for more."""
        first, *others = self.choices(prompt, params, numbers)
        if others:
            raise RequestError("SamplingParams.n", expected="1 for a stream", actual=len(others) + 1)
        return first

    def groups(
        self,
        prompt: Prompt | Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        numbers: Numbers | None = None,
    ) -> tuple[list[list[Generation]], bool]:
        """Return the choices of one prompt or of each of several, and whether there are several.

        Several may have one SamplingParams each. Raises RequestError or ContextLengthError, which names the prompt if
        there are several.
        """
        if not is_batch(prompt):
            return [self.choices(cast(Prompt, prompt), cast(SamplingParams | None, params), numbers)], False
        each = params if isinstance(params, (list, tuple)) else [params] * len(prompt)
        if each is not params and params is not None:
            # An error about the settings of all is about none of the prompts.
            self.request((0,), cast(SamplingParams, params), numbers=count())
        if len(each) != len(prompt):
            raise RequestError("params", expected=f"one for all or {len(prompt)}, as prompts", actual=len(each))

        def checked(one: tuple[Prompt, SamplingParams | None]) -> list[Generation]:
            choices = self.choices(*one, numbers)
            self.engine.sequence(choices[0].request)
            return choices

        return of_each("prompts", zip(prompt, each, strict=True), checked), True

    def chat_groups(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        tools: Sequence[Tool] | None,
        tool_choice: ToolChoice,
        numbers: Numbers | None = None,
        **options: Any,
    ) -> tuple[list[list[Generation]], bool]:
        """Return the choices of one conversation or of each of several, and whether there are several.

        `options` as for `chat_reader`. Raises RequestError, ContextLengthError.
        """
        tools = () if tool_choice == "none" else tuple(checked_tools(tools) or ())
        choice = choice_by_name(tool_choice, tuple(schemas_of(tools)))
        if not self.may_offer(tools, choice.called):
            fix = 'pass tool_choice="required", or another that makes it call one, or leave them out'
            raise RequestError("tools: the chat template of this model has none", fix=fix)
        prompts = self.chat_prompts(messages, tools=tools or None, **options)

        def bound(own: Any) -> Any:
            own = SamplingParams() if own is None else own
            is_wrong = not isinstance(own, SamplingParams)  # which `groups` refuses
            if is_wrong:
                return own
            return self.calling(own, tools, choice.called, one_call=choice.is_single, allowed=choice.allowed)

        params = [bound(own) for own in params] if isinstance(params, (list, tuple)) else bound(params)
        groups, are_several = self.groups(cast(Prompts, prompts), params, numbers)
        if tools:
            schemas, shown_ids = schemas_of(tools, choice.allowed), marker_ids(self.tokenizer)
            for job in (job for group in groups for job in group):
                job.schemas, job.only_known, job.shown_ids = schemas, bool(choice.allowed), shown_ids
                job.thought_end = opened_thought(self.tokenizer, job.request.prompt_ids)
        return groups, are_several

    def chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], **options: Any
    ) -> list[int] | list[list[int]]:
        """Return the token ids of one conversation, or of each; `options` as for `chat_reader`."""
        ids_of = self.chat_reader(**options)
        return of_each("prompts", messages, ids_of) if are_conversations(messages) else ids_of(messages)

    def chat_reader(self, **options: Any) -> Callable[[Any], list[int]]:
        """Return a function that gives a conversation's token ids, for an answer: `on_chat` hears of it.

        `options` and errors as of `chat_renderer`.
        """
        tokens_of = self.chat_renderer(**options)

        def ids_of(messages: Sequence[Message]) -> list[int]:
            ids = tokens_of(messages)
            self.note_chat(ids, messages, tokens_of)
            return ids

        return ids_of

    def note_chat(self, ids: Sequence[int], messages: Sequence[Message], tokens_of: TokensOf) -> None:
        """Tell of a chat that is to be answered, for a caller of `chat_renderer`; arguments as of `on_chat`."""
        if self.on_chat is not None:
            self.on_chat(ids, messages, tokens_of)

    def chat_renderer(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        allow_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensOf:
        """Return a function that gives a conversation's token ids, as the checkpoint's chat template renders it.

        It raises RequestError for the conversation, this method for an option.
        """
        if self.chat_template is None:
            raise RequestError("the checkpoint has no chat template", fix="use generate, or add chat_template.jinja")
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer", fix="pass token ids instead of text")
        check_switch("allow_special_tokens", allow_special_tokens)
        check_switch("add_generation_prompt", add_generation_prompt)
        options = template_variables(template_kwargs) | {"tools": tools, "add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            check_switch("enable_thinking", enable_thinking)
            options["enable_thinking"] = enable_thinking
        control_tokens = () if allow_special_tokens else self.tokenizer.control_tokens.texts
        template, tokenizer = self.chat_template, self.tokenizer

        def tokens_of(messages: Sequence[Message]) -> list[int]:
            text = template.render_marked(messages, control_tokens, **options)
            return tokenizer.encode_marked(text, max_tokens=self.engine.limits.max_context)

        return tokens_of

    def logits(self, prompt: Prompt) -> Reading:
        """Return a reading of the logits at every position: float32 [T, V]."""
        return self._reading(prompt, self.engine.executor.prompt_logits, joined)

    def score(self, prompt: Prompt) -> Reading:
        """Return a reading of the log-probability of each token after the first: float32 [T - 1]."""
        return self._reading(prompt, self.engine.executor.prompt_logits, scores)

    def embed(
        self, prompt: Prompt | Prompts, pooling: Pooling, normalize: bool, name: str = "prompts"
    ) -> list[Reading]:
        """Return readings of the embedding of one prompt or of each of several: float32 [H]. Errors as of `groups`."""
        if pooling not in ("mean", "last"):
            raise RequestError("pooling", expected="mean | last", actual=quoted(pooling))
        check_switch("normalize", normalize)
        collect = partial(pooled, mean=pooling == "mean", normalize=normalize)

        def reading(one: Prompt) -> Reading:
            return self._reading(one, self.engine.executor.prompt_states, collect)

        return of_each(name, prompt, reading) if is_batch(prompt) else [reading(cast(Prompt, prompt))]

    def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises RequestError for what is neither text nor ids of the vocabulary."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the checkpoint has no tokenizer", fix="pass token ids instead of text")
            return tuple(self.tokenizer.encode(prompt, max_tokens=self.engine.limits.max_context))
        ids: Any = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray, memoryview)):
            fix = "decode it: prompt.decode()" if isinstance(ids, (bytes, bytearray)) else None
            raise RequestError("prompt", expected="text or a list of token ids", actual=type(prompt).__name__, fix=fix)
        vocab = self.config.vocab_size
        for index, token in enumerate(ids):
            is_integer = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
            if not is_integer or not 0 <= token < vocab:
                are_several = isinstance(token, (str, list, tuple, np.ndarray))
                fix = "pass one prompt; generate and embed take a list of them too" if are_several else None
                expected = f"an id in [0, {vocab})"
                raise RequestError(f"prompt: token {index}", expected=expected, actual=quoted(token), fix=fix)
        return tuple(int(token) for token in ids)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        """Raise RequestError for ids beyond the model's vocabulary, such as those of another tokenizer."""
        for token in ids:
            if token >= self.config.vocab_size:
                expected = f"ids in [0, {self.config.vocab_size})"
                raise RequestError(f"SamplingParams.{name}", expected=expected, actual=token)

    def _reading(
        self,
        prompt: Prompt,
        read: _ChunkReader,
        collect: Callable[[tuple[int, ...], Iterator[F32]], Generator[None, None, F32]],
    ) -> Reading:
        """Return a reading whose result `collect` makes of the chunks that the executor yields."""
        ids = self.token_ids(prompt)
        check_prompt(ids, self.engine.limits.max_context)
        return Reading(len(ids), lambda slot, block_table: collect(ids, read(slot, ids, block_table)))

    def _form(self, prompt_ids: tuple[int, ...], params: SamplingParams, num_begun: int) -> dict[str, Any]:
        """Return the fields of a request that give its answer a form."""
        form = params.form
        if form is None:
            return {}
        if self.tokenizer is None:
            raise RequestError(f"SamplingParams.{form.kind} needs a tokenizer", fix="leave it out")
        return self.forms.request_fields(prompt_ids, params, num_begun)

    @cached_property
    def forms(self) -> AnswerForms:
        """What gives answers a form; the model must have a tokenizer."""
        from cpmrt.answer_forms import AnswerForms

        assert self.tokenizer is not None
        return AnswerForms(self.tokenizer, self.chat_template, self._end_token_ids())

    def _thinking_budget(self, ids: tuple[int, ...], params: SamplingParams, num_begun: int) -> ThinkingBudget | None:
        if params.max_thinking_tokens is None:
            return None
        if self.tokenizer is None:
            raise RequestError("max_thinking_tokens needs a tokenizer", fix="leave it out")
        prompt_end = prompt_end_of(self.tokenizer, ids, num_begun)
        return ThinkingBudget(params.max_thinking_tokens, ThoughtEnd(self.tokenizer, prompt_end, self._closings))

    @cached_property
    def _closings(self) -> dict[str, tuple[int, ...]]:
        """The tokens that close a thought, found out for the first request with a budget for thoughts."""
        assert self.tokenizer is not None
        return closings(self.tokenizer, self.chat_template)

    def _end_token_ids(self) -> tuple[int, ...]:
        own = self.tokenizer.eos_token_ids if self.tokenizer else ()
        return (*self.config.eos_token_ids, *own)


def is_batch(prompt: object) -> TypeGuard[Prompts]:
    """Tell whether this is a list of prompts, and not of token ids."""
    is_list = isinstance(prompt, (list, tuple)) and len(prompt) > 0
    return is_list and not isinstance(cast(Sequence[object], prompt)[0], (int, float, np.number))


def are_conversations(messages: object) -> TypeGuard[Sequence[Sequence[Message]]]:
    """Tell whether this is a list of conversations, and not of messages."""
    return isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
