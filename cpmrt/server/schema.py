"""Requests of the API as typed values. `unused_fields` has the fields that are accepted or refused without being used.

Every function raises ApiError 400 or RequestError naming the field.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from cpmrt.config import SamplingParams
from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.engine import request_seed
from cpmrt.server.answer_form import read_form
from cpmrt.server.errors import ApiError, invalid, naming, unsupported
from cpmrt.server.json_body import Fields, is_number, shown, token_ids
from cpmrt.server.refusals import with_refusals_as_text
from cpmrt.server.unused_fields import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS, check_unused
from cpmrt.text.messages import arguments_in
from cpmrt.tool_use.tool_choice import read_tool_choice

MAX_PROMPTS = 128
MAX_STOP = 1024
MAX_STOP_BYTES = 16 * 1024
"""The most bytes of all stop strings of a request together."""
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 4096
MAX_CHOICES = 128
MAX_TEMPLATE_VARIABLES = 64
MAX_TOOLS = 512
_ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "allow_special_tokens", "self"}
_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "loop_penalty",
)  # fmt: skip

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_EFFORTS_WITHOUT_THOUGHTS = ("none", "minimal")


@dataclass(frozen=True)
class Wanted:
    """The fields that chats and completions share: sampling, length, number of choices, log-probabilities, stream.

    `sampling.seed` is always set. `logprobs` None means that they are not asked for. `include_usage` asks for a last
    chunk with the usage, `running_usage` for the usage so far in every chunk. `form_names` has the client's own name of
    the field of `sampling` that gives the form.
    """

    sampling: SamplingParams
    num_choices: int
    logprobs: int | None
    streams: bool
    include_usage: bool
    running_usage: bool
    form_names: Mapping[str, str]

    def seed(self, choice: int) -> int:
        """Return the seed of one choice: that of the request for the first, one derived from it for the others."""
        assert self.sampling.seed is not None
        return request_seed(self.sampling.seed, choice) if choice else self.sampling.seed


@dataclass(frozen=True)
class ChatRequest:
    """POST /v1/chat/completions. `tools` are empty where the model may call none; with `one_call` it may make one call.

    `called` are the names of tools of which the answer must call one; empty: it need not call any. `allowed` are those
    of the tools that it may call; empty: all.
    `allow_special_tokens`: special tokens that users, tools and documents write count as such.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    called: tuple[str, ...]
    allowed: tuple[str, ...]
    template_kwargs: dict[str, Any]
    allow_special_tokens: bool
    one_call: bool
    wanted: Wanted


@dataclass(frozen=True)
class CompletionRequest:
    """POST /v1/completions. `prompts` are texts or token ids; `echo` puts them in front of their answers.

    With a `suffix`, all prompts are texts and the answer is the text between a prompt and the suffix. If `generates` is
    False, no token is wanted but those of the prompts. `num_kept` of the `wanted.num_choices` choices of each prompt
    are given, those with the best log-probability per token.
    """

    prompts: list[str | list[int]]
    suffix: str
    echo: bool
    generates: bool
    wanted: Wanted
    num_kept: int


def read_chat(body: dict[str, Any], models: Sequence[str]) -> ChatRequest:
    """Read a chat for the model that is served under these names."""
    fields = Fields(body)
    check_model(fields, models)
    check_unused(fields, REFUSED_IN_CHATS)
    tools = read_tools(fields)
    choice = read_tool_choice(fields.raw("tool_choice"), [tool["function"]["name"] for tool in tools])
    return ChatRequest(
        messages=read_messages(fields),
        tools=tools,
        called=choice.called,
        allowed=choice.allowed,
        template_kwargs=read_template_kwargs(fields),
        allow_special_tokens=fields.boolean("allow_special_tokens") is True,
        one_call=fields.boolean("parallel_tool_calls") is False or choice.is_single,
        wanted=read_wanted(fields, _chat_max_tokens(fields), _chat_logprobs(fields)),
    )


def read_completion(body: dict[str, Any], models: Sequence[str]) -> CompletionRequest:
    """Read a plain completion for the model that is served under these names."""
    fields = Fields(body)
    check_model(fields, models)
    check_unused(fields, REFUSED_IN_COMPLETIONS)
    logprobs = fields.integer("logprobs", range(MAX_LOGPROBS + 1))
    echo = bool(fields.boolean("echo"))
    max_tokens = fields.integer("max_tokens")
    generates = not echo or max_tokens != 0
    wanted = read_wanted(fields, max_tokens if generates else None, logprobs)
    if not generates and wanted.streams:
        raise invalid("max_tokens", "0 only without stream: nothing comes bit by bit")
    prompts, suffix = read_prompts(fields, "prompt", MAX_PROMPTS), fields.string("suffix") or ""
    if suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid("suffix", "only together with prompts that are texts")
    return CompletionRequest(prompts, suffix, echo, generates, _with_best_of(fields, wanted), wanted.num_choices)


def _with_best_of(fields: Fields, wanted: Wanted) -> Wanted:
    """Return what is wanted, with as many choices as have to be tried."""
    best_of = fields.integer("best_of", range(1, MAX_CHOICES + 1)) or wanted.num_choices
    if best_of == wanted.num_choices:
        return wanted
    if best_of < wanted.num_choices:
        raise invalid("best_of", f"expected at least n ({wanted.num_choices}), got {best_of}")
    if wanted.streams:
        raise invalid("best_of", "not together with stream: the best are known at the end only")
    sampling = replace(wanted.sampling, logprobs=max(1, wanted.sampling.logprobs))
    return replace(wanted, sampling=sampling, num_choices=best_of)


def read_wanted(
    fields: Fields, max_tokens: int | None, logprobs: int | None, *, stop_field: str = "stop"
) -> Wanted:
    """Read the fields that all kinds of request share; `stop_field` is the field of the stop strings."""
    if max_tokens is not None and max_tokens < 1:
        raise invalid("max_tokens", f"expected at least 1, got {max_tokens}")
    given = {name: fields.number(name) for name in _NUMBERS}
    numbers: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    top_k = fields.integer("top_k")
    num_choices, seed = fields.integer("n", range(1, MAX_CHOICES + 1)), fields.integer("seed")
    form, form_names = read_form(fields)
    with naming(form_names):
        sampling = SamplingParams(
            max_new_tokens=max_tokens and min(max_tokens, 2**31 - 1),
            top_k=None if top_k is None else max(0, top_k),  # others write -1 for "all"
            seed=secrets.randbits(63) if seed is None else seed % 2**64,
            stop=_stop(fields, stop_field),
            stop_token_ids=_stop_token_ids(fields),
            ignore_eos=bool(fields.boolean("ignore_eos")),
            logprobs=0 if logprobs is None else max(1, logprobs),
            logit_bias=_logit_bias(fields),
            loop_repeats=fields.integer("loop_repeats") or 0,
            max_thinking_tokens=fields.integer("max_thinking_tokens"),
            **form,
            **numbers,
        )
    streams, options = bool(fields.boolean("stream")), fields.object("stream_options")
    if options is not None and not streams:
        raise invalid("stream_options", "only together with stream")
    include_usage = options is not None and bool(options.boolean("include_usage"))
    running_usage = options is not None and bool(options.boolean("continuous_usage_stats"))
    return Wanted(sampling, num_choices or 1, logprobs, streams, include_usage, running_usage, form_names)


def check_model(fields: Fields, served: Sequence[str]) -> None:
    """Raise ApiError 404 if a request names another model."""
    name = fields.string("model")
    if name is not None and name not in served:
        message = f"the model {shown(name)} does not exist here; this server has {' and '.join(map(repr, served))}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _thinking_kwargs(fields: Fields) -> dict[str, Any]:
    """Return the template's variables for `reasoning_effort`; none without it: the template decides about thinking."""
    effort = fields.string("reasoning_effort")
    if effort is None:
        return {}
    if effort not in REASONING_EFFORTS:
        raise invalid("reasoning_effort", f"expected one of {', '.join(REASONING_EFFORTS)}, got {shown(effort)}")
    return {"enable_thinking": effort not in _EFFORTS_WITHOUT_THOUGHTS, "reasoning_effort": effort}


def _chat_max_tokens(fields: Fields) -> int | None:
    older, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens", range(1, 2**31))
    if older is not None and newer is not None and older != newer:
        raise invalid("max_tokens", "contradicts max_completion_tokens; give one of them")
    return older if newer is None else newer


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, count = fields.boolean("logprobs"), fields.integer("top_logprobs", range(MAX_LOGPROBS + 1))
    if count and not wanted:
        raise invalid("top_logprobs", "only together with logprobs: true")
    return (count or 0) if wanted else None


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Read the messages of a chat, as templates take them."""
    messages = fields.array("messages")
    if not messages:
        raise invalid("messages", f"expected an array of at least one message, got {shown(messages)}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_template_kwargs(fields: Fields) -> dict[str, Any]:
    """Read the variables that a request sets for the chat template, those of its `reasoning_effort` too."""
    template_kwargs = fields.mapping("chat_template_kwargs") or {}
    if len(template_kwargs) > MAX_TEMPLATE_VARIABLES:
        problem = f"expected at most {MAX_TEMPLATE_VARIABLES} variables, got {len(template_kwargs)}"
        raise invalid("chat_template_kwargs", problem)
    for name in RESERVED_TEMPLATE_NAMES & set(template_kwargs):
        raise invalid(f"chat_template_kwargs.{name}", "this variable is the server's own")
    return _thinking_kwargs(fields) | template_kwargs


def check_role(role: Any, where: str) -> str:
    """Return the role of a message. Raises ApiError 400 for an unknown one."""
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"expected {', '.join(_ROLES)}, got {shown(role)}")
    return str(role)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(where, f"expected an object with role and content, got {shown(message)}")
    role = check_role(message.get("role"), where)
    if message.get("function_call") is not None:
        raise unsupported(f"{where}.function_call", "use tool_calls")
    copy = with_refusals_as_text(message, where) if role == "assistant" else dict(message)
    copy["role"] = "system" if role == "developer" else role
    if message.get("tool_calls") is not None:
        copy["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return copy


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Parse the arguments of tool calls: templates want objects, the API has JSON in a string."""
    checked = []
    for index, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = f"expected an object with a function, which has name and arguments, got {shown(call)}"
            raise invalid(f"{where}[{index}]", problem)
        arguments = function.get("arguments")
        if isinstance(arguments, str) or arguments is None:
            arguments = arguments_in(arguments or "{}")
        if not isinstance(arguments, dict):
            problem = f"expected a JSON object in a string, got {shown(function['arguments'])}"
            raise invalid(f"{where}[{index}].function.arguments", problem)
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def given_tools(fields: Fields) -> list[Any]:
    """Return the tools of a request, at most MAX_TOOLS, as they are."""
    tools = fields.array("tools") or []
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"expected at most {MAX_TOOLS} tools, got {len(tools)}")
    return tools


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """Read the tools that a model may call; empty where it may call none."""
    tools, choice = given_tools(fields), fields.raw("tool_choice")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = f'expected {{"type": "function", "function": {{"name": ...}}}}, got {shown(tool)}'
            raise invalid(f"tools[{index}]", problem)
        if not isinstance(function.get("parameters"), (dict, NoneType)):
            problem = f"expected a JSON schema (an object), got {shown(function['parameters'])}"
            raise invalid(f"tools[{index}].function.parameters", problem)
    if choice not in (None, "none") and not tools:
        raise invalid("tool_choice", "only together with tools")
    return [] if choice == "none" else [{**tool, "function": _given(tool["function"])} for tool in tools]


def _given(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function without fields that are null: templates would write them out."""
    return {name: value for name, value in function.items() if value is not None}


def read_prompts(fields: Fields, name: str, most: int) -> list[str | list[int]]:
    """Read a field with one prompt or several, at most `most`."""
    value = fields.raw(name)
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], (str, list))):
        return [_prompt(value, name)]
    if not isinstance(value, list) or not value:
        raise invalid(name, f"expected a string, an array of token ids, or an array of either, got {shown(value)}")
    if len(value) > most:
        raise invalid(name, f"expected at most {most} prompts, got {len(value)}")
    return [_prompt(prompt, f"{name}[{index}]") for index, prompt in enumerate(value)]


def _prompt(value: Any, where: str) -> str | list[int]:
    if not isinstance(value, (str, list)):
        raise invalid(where, f"expected a string or an array of token ids, got {shown(value)}")
    return value if isinstance(value, str) else token_ids(value, where)


def _stop(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.raw(name)
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list):
        raise invalid(name, f"expected a non-empty string or an array of them, got {shown(value)}")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            where = name if isinstance(value, str) else f"{name}[{index}]"
            raise invalid(where, f"expected a non-empty string, got {shown(text)}")
    if len(texts) > MAX_STOP:
        raise invalid(name, f"expected at most {MAX_STOP} strings, got {len(texts)}")
    try:
        num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    except UnicodeEncodeError:
        raise invalid(name, "expected valid Unicode, got half of a surrogate pair") from None
    if num_bytes > MAX_STOP_BYTES:
        raise invalid(name, f"expected at most {MAX_STOP_BYTES} bytes in all strings together, got {num_bytes}")
    return tuple(texts)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = token_ids(fields.array("stop_token_ids") or [], "stop_token_ids")
    for index, token in enumerate(ids):
        if not 0 <= token < 2**31:
            raise invalid(f"stop_token_ids[{index}]", f"expected a token id, got {shown(token)}")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"expected at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
    return tuple(ids)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = dict[int, float]()
    given = fields.mapping("logit_bias") or {}
    if len(given) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"expected at most {MAX_LOGIT_BIAS} token ids, got {len(given)}")
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f"expected token ids as keys, got {shown(key)}")
        if not (is_number(bias) and -100 <= bias <= 100):
            raise invalid("logit_bias", f"expected numbers in [-100, 100] as values, got {shown(bias)} for token {key}")
        if int(key) in biases:
            raise invalid("logit_bias", f"expected one bias for each token, got two for token {int(key)}")
        biases[int(key)] = float(bias)
    return tuple(biases.items())
