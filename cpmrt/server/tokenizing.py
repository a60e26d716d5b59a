"""Answers to /tokenize, /detokenize and /tokenizer_info: texts and chats as token ids, and back.

Field names are those of vLLM ("prompt", "messages") and llama.cpp ("content", "with_pieces", "add_special"), and so is
what stands before a text: BOS before a prompt, and nothing before a content, unless the request says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cpmrt.server.errors import ApiError, invalid
from cpmrt.server.fill_in_middle import markers_of
from cpmrt.server.json_body import Fields, token_ids
from cpmrt.server.schema import read_messages, read_template_kwargs, read_tools
from cpmrt.server.service import Service
from cpmrt.server.unused_fields import REFUSED_IN_TOKENIZE, check_unused
from cpmrt.text import Tokenizer


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer. Raises ApiError 400 for a model that has none."""
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer", code="no_tokenizer")
    return tokenizer


def tokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a text, or those of a chat as its template writes it. Raises ApiError, RequestError."""
    fields, llm = Fields(body), service.engine.llm
    tokenizer = needed(llm.tokenizer)
    given = [name for name in ("messages", "prompt", "content") if fields.raw(name) is not None]
    if len(given) > 1:
        raise invalid(given[1], f"contradicts {given[0]}; give one of them")
    text, content = fields.string("prompt"), fields.string("content")
    template, encode = _template_fields(fields), _encoder(tokenizer, fields, begins=text is not None)
    if fields.raw("messages") is not None:
        ids = llm.maker.chat_renderer(**template)(read_messages(fields))
    elif text is None and content is None:
        raise invalid("prompt", "expected a string, or messages")
    else:
        ids = encode(content or "" if text is None else text)
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": llm.max_context}
    if fields.boolean("return_token_strs"):
        answer["token_strs"] = [written(tokenizer, token) for token in ids]
    if fields.boolean("with_pieces"):
        answer["tokens"] = [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]
    return answer


def detokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the text of {"tokens": [...]}, special tokens written out. Raises ApiError, RequestError."""
    tokens = token_ids(Fields(body).raw("tokens"), "tokens")
    llm = service.engine.llm
    for index, token in enumerate(tokens):
        if not 0 <= token < llm.config.vocab_size:
            raise invalid(f"tokens[{index}]", f"expected an id in [0, {llm.config.vocab_size}), got {token}")
    text = needed(llm.tokenizer).decode(tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return what a client needs to build prompts of its own. Raises ApiError 400 without a tokenizer."""
    llm = service.engine.llm
    tokenizer = needed(llm.tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
    markers = markers_of(tokenizer)
    return {
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": llm.max_context,
        "bos_token": None if bos is None else written(tokenizer, bos),
        "bos_token_id": bos,
        "add_bos_token": bos is not None and tokenizer.encode("")[:1] == [bos],
        "eos_token": written(tokenizer, eos[0]) if eos else None,
        "eos_token_ids": list(eos),
        "special_tokens": {written(tokenizer, token): token for token in sorted(tokenizer.special_ids)},
        "fill_in_middle": markers and dict(zip(("prefix", "suffix", "middle"), markers.texts, strict=True)),
        "chat_template": llm.chat_template.source if llm.chat_template else None,
    }


def written(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token, special or not; bytes that are no character by themselves become U+FFFD."""
    return tokenizer.written_bytes(token_id).decode("utf-8", "replace")


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """Return the text of one token, or its bytes if they are no text by themselves."""
    written_bytes = tokenizer.written_bytes(token_id)
    try:
        return written_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return list(written_bytes)


def _encoder(tokenizer: Tokenizer, fields: Fields, *, begins: bool) -> Callable[[str], list[int]]:
    """Return the function that tokenizes a text. `begins`: BOS comes first by default. Raises ApiError 400."""
    for name in ("add_special_tokens", "add_special"):
        wanted = fields.boolean(name)
        begins = begins if wanted is None else wanted
    if fields.boolean("parse_special") is False:
        return lambda text: tokenizer.encode("", add_special_tokens=begins) + tokenizer.encode_plain(text)
    return partial(tokenizer.encode, add_special_tokens=begins)


def _template_fields(fields: Fields) -> dict[str, Any]:
    """Read the arguments of a chat's template besides the messages. Raises ApiError 400, even without messages."""
    check_unused(fields, REFUSED_IN_TOKENIZE)
    return {
        "tools": read_tools(fields) or None,
        "add_generation_prompt": fields.boolean("add_generation_prompt") is not False,
        "allow_special_tokens": fields.boolean("allow_special_tokens") is True,
        "template_kwargs": read_template_kwargs(fields),
    }
