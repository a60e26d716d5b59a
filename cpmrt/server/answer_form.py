"""The form that a request wants its answer to have, in the words of the OpenAI API, vLLM, SGLang and llama.cpp.

| field | of |
|---|---|
| `response_format` | OpenAI |
| `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | vLLM |
| `structured_outputs` with `json`, `regex`, `choice`, `grammar` or `json_object` | vLLM |
| `json_schema`, `grammar`, a `schema` of `response_format`; `regex`, `ebnf` | llama.cpp; SGLang |
"""

from __future__ import annotations

from typing import Any

from cpmrt.server.errors import invalid
from cpmrt.server.json_body import Fields, shown

_ANY_OBJECT = {"type": "object"}
_GUIDED = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "grammar",
    "json_schema": "json_schema", "regex": "regex", "grammar": "grammar", "ebnf": "grammar",
}  # fmt: skip
FORM_FIELDS = (*_GUIDED, "structured_outputs")
"""All fields that give a form, except `response_format`."""
_OUTPUTS = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}


def may_need_form(body: dict[str, Any]) -> bool:
    """Whether a form may have to be compiled for a request of any of the APIs, whose fields need not be valid."""
    if any(body.get(name) for name in FORM_FIELDS) or (body.get("tools") and body.get("tool_choice") != "none"):
        return True
    text = body.get("text")
    formats = (body.get("response_format"), text.get("format") if isinstance(text, dict) else None)
    return any(isinstance(each, dict) and each.get("type") != "text" for each in formats)


def read_form(fields: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the field of SamplingParams that gives the form, with its value, and the client's name of that field.

    Both are empty if the request gives no form. Raises ApiError 400.
    """
    outputs, found = fields.object("structured_outputs"), dict[str, tuple[str, Any]]()
    found |= _response_format(fields)
    found |= _given(fields, _GUIDED)
    if outputs is not None:
        found |= _given(outputs, _OUTPUTS)
        if outputs.boolean("json_object"):
            found[outputs.name("json_object")] = ("json_schema", _ANY_OBJECT)
        if not found:
            raise invalid("structured_outputs", f"expected one of {', '.join(_OUTPUTS)} and json_object, got none")
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(second, f"not together with {first}: an answer has one form")
    return dict(found.values()), {kind: name for name, (kind, _) in found.items()}


def _given(fields: Fields, kinds: dict[str, str]) -> dict[str, tuple[str, Any]]:
    """Return kind and value of each of these fields that gives a form, by the name that errors give to the field."""
    values = {name: _value(fields, name, kind) for name, kind in kinds.items()}
    return {fields.name(name): (kinds[name], value) for name, value in values.items() if value is not None}


def _value(fields: Fields, name: str, kind: str) -> Any:
    """Return a field of this kind; None if it asks for nothing, as empty ones of llama.cpp and SGLang do."""
    value = fields.raw(name)
    if value is None or (value in ("", {}) and not name.startswith("guided_")):
        return None
    if kind == "json_schema":
        is_schema = isinstance(value, dict) or (isinstance(value, str) and name != "json_schema")
        if not is_schema:
            raise invalid(fields.name(name), f"expected a JSON schema, got {shown(value)}")
    elif kind == "choices":
        choices = fields.array(name)
        wrong = [choice for choice in choices or [choices] if not isinstance(choice, str) or not choice]
        if wrong:
            raise invalid(fields.name(name), f"expected an array of strings, none empty, got {shown(wrong[0])}")
    elif not fields.string(name):
        raise invalid(fields.name(name), "expected a string that is not empty, got ''")
    return value


def _response_format(fields: Fields) -> dict[str, tuple[str, Any]]:
    wanted = fields.object("response_format")
    kind = "text" if wanted is None else wanted.string("type")
    if wanted is None or kind == "text":
        return {}
    if kind == "json_object":
        schema = wanted.mapping("schema")  # as llama.cpp has it
        name = wanted.name("schema") if schema else "response_format"
        return {name: ("json_schema", schema or _ANY_OBJECT)}
    if kind != "json_schema":
        raise invalid("response_format.type", f"expected text, json_object or json_schema, got {shown(kind)}")
    described = wanted.object("json_schema")
    if described is None:
        raise invalid("response_format.json_schema", "expected an object with a name and a schema, got null")
    schema = described.mapping("schema")
    if schema is None:
        raise invalid(described.name("schema"), "expected a JSON schema (an object), got null")
    described.boolean("strict")  # a schema binds either way
    return {described.name("schema"): ("json_schema", schema)}
