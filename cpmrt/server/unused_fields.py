"""Fields of requests that this server does nothing with: harmless ones are accepted, the others are refused by name.

A field that would change the answer must not be ignored: its client would take the answer for something that it is not.
Fields in neither table are unknown here and ignored.
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

_USE_LOGIT_BIAS = "use logit_bias, or a prompt that says what is wanted"
_USE_SAMPLING = "sample with temperature, top_p, top_k and min_p"

Refused = tuple[tuple[Any, ...], str]
"""The values that ask for nothing, and what to do instead."""

REFUSED: dict[str, Refused] = {
    "guided_whitespace_pattern": ((), "JSON is written on one line, with a space behind commas and colons"),
    "min_tokens": ((0,), "use ignore_eos with max_tokens"),
    "min_new_tokens": ((0,), "use ignore_eos with max_tokens"),
    "bad_words": (([],), _USE_LOGIT_BIAS),
    "allowed_token_ids": ((), _USE_LOGIT_BIAS),
    "logits_processors": (([],), _USE_LOGIT_BIAS),
    "use_beam_search": ((False,), _USE_SAMPLING),
    "length_penalty": ((1,), _USE_SAMPLING),
    "early_stopping": ((False,), _USE_SAMPLING),
    "typical_p": ((1,), _USE_SAMPLING),
    "tfs_z": ((1,), _USE_SAMPLING),
    "mirostat": ((0,), _USE_SAMPLING),
    "xtc_probability": ((0,), _USE_SAMPLING),
    "dry_multiplier": ((0,), _USE_SAMPLING),
    "no_repeat_ngram_size": ((0,), "use repetition_penalty, presence_penalty or frequency_penalty"),
    "prompt_logprobs": ((0, False), "ask /v1/completions with echo and logprobs"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "include_stop_str_in_output": ((False,), "answers end before their stop string"),
    "skip_special_tokens": ((True,), "answers have no special tokens"),
    "return_tokens_as_token_ids": ((False,), "use /tokenize"),
    "return_token_ids": ((False,), "use /tokenize"),
}
"""Fields that would change any answer."""

REFUSED_IN_CHATS: dict[str, Refused] = {
    **REFUSED,
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
