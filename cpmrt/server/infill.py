"""POST /infill: filling in the middle as the editor plug-ins of llama.cpp ask for it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from cpmrt.server.answers import event
from cpmrt.server.engine_thread import Item
from cpmrt.server.errors import ApiError, invalid, naming
from cpmrt.server.fill_in_middle import fill_prompt
from cpmrt.server.json_body import Fields, shown
from cpmrt.server.schema import read_wanted
from cpmrt.server.service import Prepared, Service, choices_of
from cpmrt.server.unused_fields import REFUSED_IN_INFILL, check_unused
from cpmrt.sharing.jobs import Ended

_DEFAULT_TOKENS = 128
_RENAMED = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""llama.cpp's names of fields that the other endpoints have too."""
_STOP_TYPES = {"stop": "eos", "length": "limit"}


def prepare_infill(service: Service, body: dict[str, Any]) -> Prepared:
    """Check a request and write its prompt. Raises ApiError, CpmrtError.

    `input_prefix` and `input_suffix` stand around the cursor, `prompt` is what the answer begins with, and
    `input_extra` has other files, objects with `text` and perhaps `filename`.
    """
    fields = Fields(_renamed(body))
    with naming({ours: theirs for theirs, ours in _RENAMED.items() if theirs in body}):
        return _prepared(service, fields)


def _renamed(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the other endpoints' names. Raises ApiError for two names of a field that contradict."""
    fields = dict(body)
    for theirs, ours in _RENAMED.items():
        value = fields.pop(theirs, None)
        if value is None:
            continue
        if fields.get(ours) not in (None, value):
            raise invalid(theirs, f"contradicts {ours}; give one of them")
        fields[ours] = value
    return fields


def _prepared(service: Service, fields: Fields) -> Prepared:
    check_unused(fields, REFUSED_IN_INFILL)
    prefix, suffix = fields.string("input_prefix") or "", fields.string("input_suffix") or ""
    max_tokens = fields.integer("max_tokens")
    # llama.cpp's clients ask for no token to warm the cache up, and for -1 to mean "as many as there is room for".
    is_unlimited = max_tokens is not None and max_tokens < 0
    limit = _DEFAULT_TOKENS if max_tokens is None else max(1, max_tokens)
    wanted = read_wanted(fields, None if is_unlimited else limit, None)
    if wanted.num_choices != 1:
        raise invalid("n", "only one choice here")
    llm = service.engine.llm
    ids = fill_prompt(
        llm.tokenizer,
        prefix,
        suffix,
        begun=fields.string("prompt") or "",
        before=_extra_text(fields),
        param="input_suffix",
    )
    return Prepared(
        f"infill-{secrets.token_hex(12)}",
        choices_of(llm, ids, wanted),
        wanted,
        InfillFormat(service.settings.model_name, is_silent=max_tokens == 0),
    )


def _extra_text(fields: Fields) -> str:
    texts = []
    for index, extra in enumerate(fields.array("input_extra") or []):
        text = extra.get("text") if isinstance(extra, dict) else None
        if not isinstance(text, str):
            raise invalid(f"input_extra[{index}]", f"expected an object with text, got {shown(extra)}")
        texts.append(f"--- {extra.get('filename') or 'snippet'} ---\n{text}\n\n")
    return "".join(texts)


class InfillFormat:
    """Writes answers as llama.cpp does; with `is_silent` no text, as nothing but a warm cache was asked for."""

    ping = ": ping\n\n"

    def __init__(self, model_name: str, *, is_silent: bool):
        self._model_name, self._is_silent = model_name, is_silent
        self._texts: list[str] = []
        self._ended: Ended | None = None

    def begin(self) -> str:
        return ""

    def stream(self, item: Item) -> str:
        text = self._take(item)
        return event({"content": text, "stop": False}) if text else ""

    def end(self, usage: dict[str, Any]) -> str:
        return event(self._fields(""))

    def failed(self, error: ApiError) -> str:
        return f"error: {json.dumps(error.body()['error'])}\n\n"

    def add(self, item: Item) -> None:
        self._texts.append(self._take(item))

    def whole(self, usage: dict[str, Any]) -> Iterator[str]:
        yield json.dumps(self._fields("".join(self._texts)), ensure_ascii=False)

    def _fields(self, content: str) -> dict[str, Any]:
        assert self._ended is not None
        stats = self._ended.stats
        return {
            "content": content,
            "stop": True,
            "stop_type": _STOP_TYPES.get(self._ended.reason, self._ended.reason),
            "model": self._model_name,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.cached_tokens,
            "tokens_predicted": stats.new_tokens,
            "truncated": False,
            "timings": {
                "prompt_n": stats.prompt_tokens - stats.cached_tokens,
                "prompt_ms": stats.prefill_s * 1e3,
                "prompt_per_second": stats.prefill_tokens_per_s,
                "predicted_n": stats.new_tokens,
                "predicted_ms": stats.decode_s * 1e3,
                "predicted_per_second": stats.decode_tokens_per_s,
            },
        }

    def _take(self, item: Item) -> str:
        part = item[1]
        if isinstance(part, Ended):
            self._ended = part
            return ""
        return "" if self._is_silent else part.text
