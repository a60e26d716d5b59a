"""Fields of requests that this server does nothing with: harmless ones are accepted, the others are refused by name.

A field that would change the answer must not be ignored: its client would take the answer for something that it is not.
Fields that an endpoint has by another name count as such. Fields in neither table are unknown here and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cpmrt.server.errors import unsupported
from cpmrt.server.json_body import Fields

HARMLESS = {
    "user": "string",
    "safety_identifier": "string",
    "metadata": "object",
    "service_tier": "string",
    "store": "boolean",
    "prompt_cache_key": "string",
    "prompt_cache_retention": "string",
    "prediction": "object",
    "priority": "integer",
    "request_id": "string",
    "guided_decoding_backend": "string",
    "verbosity": "string",
}
"""Fields that change no answer, and their JSON types: who asks, what is kept, how soon and how fast; and a wish about
its length that models are free not to follow."""

LEAVE_OUT = "leave it out"
_USE_LOGIT_BIAS = "use logit_bias, or a prompt that says what is wanted"
_USE_SAMPLING = "sample with temperature, top_p, top_k and min_p"
_USE_MAX_TOKENS = "use max_tokens"
_USE_MAX_OUTPUT_TOKENS = "use max_output_tokens"
_USE_EFFORT = "use reasoning_effort, or chat_template_kwargs"
_USE_A_MESSAGE = "use a message of the role system"
USE_CHATS = "use /v1/chat/completions"
_USE_THINKING = "use thinking"
_SEND_ALL = "send the whole conversation as input: this server keeps none"
_STOPS_BEFORE = "answers end before their stop string"

Refused = tuple[tuple[Any, ...], str]
"""The values of a field that ask for nothing, which are accepted, and what to do instead of others."""

REFUSED: dict[str, Refused] = {
    "guided_whitespace_pattern": ((), "JSON is written on one line, with a space behind commas and colons"),
    "min_tokens": ((0,), "use ignore_eos with max_tokens"),
    "min_new_tokens": ((0,), "use ignore_eos with max_tokens"),
    "bad_words": (([],), _USE_LOGIT_BIAS),
    "allowed_token_ids": ((), _USE_LOGIT_BIAS),
    "logits_processors": (([],), _USE_LOGIT_BIAS),
    "max_new_tokens": ((), _USE_MAX_TOKENS),
    "max_length": ((), _USE_MAX_TOKENS),
    "n_predict": ((-1,), _USE_MAX_TOKENS),
    "num_predict": ((-1,), _USE_MAX_TOKENS),
    "repeat_penalty": ((1,), "use repetition_penalty"),
    "do_sample": ((True,), "use temperature; 0 takes the likeliest token"),
    "use_beam_search": ((False,), _USE_SAMPLING),
    "num_beams": ((1,), _USE_SAMPLING),
    "num_beam_groups": ((1,), _USE_SAMPLING),
    "diversity_penalty": ((0,), _USE_SAMPLING),
    "penalty_alpha": ((0,), _USE_SAMPLING),
    "length_penalty": ((1,), _USE_SAMPLING),
    "early_stopping": ((False,), _USE_SAMPLING),
    "top_a": ((0,), _USE_SAMPLING),
    "top_n_sigma": ((-1, 0), _USE_SAMPLING),
    "typical_p": ((1,), _USE_SAMPLING),
    "eta_cutoff": ((0,), _USE_SAMPLING),
    "epsilon_cutoff": ((0,), _USE_SAMPLING),
    "smoothing_factor": ((0,), _USE_SAMPLING),
    "dynatemp_range": ((0,), _USE_SAMPLING),
    "tfs_z": ((1,), _USE_SAMPLING),
    "mirostat": ((0,), _USE_SAMPLING),
    "xtc_probability": ((0,), _USE_SAMPLING),
    "dry_multiplier": ((0,), _USE_SAMPLING),
    "no_repeat_ngram_size": ((0,), "use repetition_penalty, presence_penalty or frequency_penalty"),
    "prompt_logprobs": ((0, False), "ask /v1/completions with echo and logprobs"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "stop_regex": (("", []), "use stop, which takes strings"),
    "include_stop_str_in_output": ((False,), _STOPS_BEFORE),
    "no_stop_trim": ((False,), _STOPS_BEFORE),
    "skip_special_tokens": ((True,), "answers have no special tokens"),
    "return_tokens_as_token_ids": ((False,), "use /tokenize"),
    "return_token_ids": ((False,), "use /tokenize"),
}
"""Fields that would change the answer of every endpoint that generates text."""

_OF_OTHER_ENDPOINTS: dict[str, Refused] = {
    "max_output_tokens": ((), _USE_MAX_TOKENS),
    "stop_sequences": (([],), "use stop"),
}
"""Fields of /v1/responses and /v1/messages, which neither chats nor completions have by that name."""

REFUSED_IN_CHATS: dict[str, Refused] = {
    **REFUSED,
    **_OF_OTHER_ENDPOINTS,
    "system": (("",), _USE_A_MESSAGE),
    "instructions": (("",), _USE_A_MESSAGE),
    "enable_thinking": ((), _USE_EFFORT),
    "thinking": ((), _USE_EFFORT),
    "reasoning": ((), _USE_EFFORT),
    "suffix": (("",), "use /v1/completions or /infill"),
    "add_special_tokens": ((False,), "the template writes them"),
    "continue_final_message": ((False,), "every answer is a message of its own; use /v1/completions"),
    "add_generation_prompt": ((True,), "every answer is a message of its own; use /v1/completions"),
    "chat_template": ((), "the template is the model's own; use /v1/completions"),
    "documents": (([],), "put them into a message"),
    "echo": ((False,), "use /v1/completions"),
    "best_of": ((1,), "use n, or /v1/completions"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "web_search_options": ((), "nothing is looked up"),
}

REFUSED_IN_COMPLETIONS: dict[str, Refused] = {
    **REFUSED,
    **_OF_OTHER_ENDPOINTS,
    "max_completion_tokens": ((), _USE_MAX_TOKENS),
    "top_logprobs": ((0,), "logprobs is their number here"),
    "add_special_tokens": ((True,), "give token ids, such as /tokenize has"),
    "tools": (([],), USE_CHATS),
}

_OWN_IN_RESPONSES = ("max_output_tokens", "instructions", "reasoning")
REFUSED_IN_RESPONSES: dict[str, Refused] = {
    **{name: refused for name, refused in REFUSED_IN_CHATS.items() if name not in _OWN_IN_RESPONSES},
    "max_tokens": ((), _USE_MAX_OUTPUT_TOKENS),
    "max_completion_tokens": ((), _USE_MAX_OUTPUT_TOKENS),
    "max_new_tokens": ((), _USE_MAX_OUTPUT_TOKENS),
    "max_length": ((), _USE_MAX_OUTPUT_TOKENS),
    "n_predict": ((-1,), _USE_MAX_OUTPUT_TOKENS),
    "num_predict": ((-1,), _USE_MAX_OUTPUT_TOKENS),
    "enable_thinking": ((), "use reasoning, or chat_template_kwargs"),
    "thinking": ((), "use reasoning, or chat_template_kwargs"),
    "reasoning_effort": ((), "use reasoning, which has an effort"),
    "response_format": ((), "use text, which has a format"),
    "messages": ((), "use input"),
    "n": ((1,), USE_CHATS),
    "logprobs": ((False,), USE_CHATS),
    "system": (("",), "use instructions"),
    "top_logprobs": ((0,), USE_CHATS),
    "truncation": (("disabled",), "shorten the input"),
    "previous_response_id": ((), _SEND_ALL),
    "conversation": ((), _SEND_ALL),
    "prompt": ((), "send the text itself"),
    "max_tool_calls": ((), "use parallel_tool_calls"),
}

REFUSED_IN_MESSAGES: dict[str, Refused] = {
    **REFUSED,
    "max_completion_tokens": ((), _USE_MAX_TOKENS),
    "max_output_tokens": ((), _USE_MAX_TOKENS),
    "stop": (("", []), "use stop_sequences"),
    "instructions": (("",), "use system"),
    "reasoning": ((), _USE_THINKING),
    "reasoning_effort": ((), _USE_THINKING),
    "enable_thinking": ((), _USE_THINKING),
    "chat_template_kwargs": (({},), _USE_THINKING),
    "parallel_tool_calls": ((True,), "use tool_choice, which has disable_parallel_tool_use"),
    "logprobs": ((False,), USE_CHATS),
    "top_logprobs": ((0,), USE_CHATS),
    "allow_special_tokens": ((False,), USE_CHATS),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "output_format": ((), LEAVE_OUT),
    "mcp_servers": (([],), LEAVE_OUT),
    "container": ((), LEAVE_OUT),
    "context_management": ((), LEAVE_OUT),
}

REFUSED_IN_INFILL: dict[str, Refused] = {
    **REFUSED,
    **_OF_OTHER_ENDPOINTS,
    "max_completion_tokens": ((), _USE_MAX_TOKENS),
    "suffix": (("",), "use input_suffix"),
    "logprobs": ((0, False), "use /v1/completions"),
}

REFUSED_IN_EMBEDDINGS: dict[str, Refused] = {
    "truncate_prompt_tokens": ((), "shorten the texts"),
    "add_special_tokens": ((True,), "give token ids, such as /tokenize has"),
}

_OF_TOKENIZED_CHATS = (
    "continue_final_message", "chat_template", "documents", "enable_thinking", "system", "instructions", "functions",
)  # fmt: skip
REFUSED_IN_TOKENIZE = {name: REFUSED_IN_CHATS[name] for name in _OF_TOKENIZED_CHATS}

_READERS: dict[str, Callable[[Fields, str], object]] = {
    "string": Fields.string,
    "object": Fields.mapping,
    "boolean": Fields.boolean,
    "integer": Fields.integer,
}


def check_unused(fields: Fields, refused: Mapping[str, Refused]) -> None:
    """Raise ApiError 400 if one of the `refused` fields asks for something, or a harmless one has another type."""
    for name, kind in HARMLESS.items():
        _READERS[kind](fields, name)
    for name, (neutral, instead) in refused.items():
        value = fields.raw(name)
        if value is not None and not any(_equal(value, each) for each in neutral):
            raise unsupported(name, instead)


def _equal(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
