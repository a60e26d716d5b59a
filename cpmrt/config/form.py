"""The form that an answer must have: a JSON schema, a regular expression, a grammar or a list of choices."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cpmrt.errors import RequestError, quoted

MAX_FORM_BYTES = 256 * 1024
"""The most bytes of a form's text in UTF-8."""
SCHEMA_FORMS = "a JSON schema: a dict, its JSON text, a pydantic model or a dataclass"
"""What may be given as a JSON schema."""
FormKind = Literal["json_schema", "regex", "grammar", "choices"]
FORM_FIELDS: tuple[FormKind, ...] = typing.get_args(FormKind)
"""The fields of SamplingParams that give a form; at most one of them may be set."""
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""llguidance's options for JSON, by which it is written as Python's json.dumps writes it: a model cannot go on with
white space for ever, and the separators between values need not be sampled."""
_ARRAYS = (list, set, frozenset, Sequence)
_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


@dataclass(frozen=True)
class Form:
    """A form as text: a JSON schema, a regular expression, a Lark grammar, or a JSON array of the choices.

    With a `trigger` the form binds the answer only from that text on, and the form itself begins with it.
    """

    kind: FormKind
    text: str
    trigger: str = ""


def form_of(
    json_schema: str | None,
    regex: str | None,
    grammar: str | None,
    choices: Sequence[str] | None,
    trigger: str | None,
) -> Form | None:
    """Return the form that one of the arguments gives, or None. Raises RequestError for several, or for a wrong one."""
    if trigger is not None and (grammar is None or not _is_valid_text(trigger)):
        expected = "a text that is not empty, together with grammar"
        raise RequestError("SamplingParams.grammar_trigger", expected=expected, actual=quoted(trigger))
    chosen = json.dumps(choices, ensure_ascii=False) if choices is not None else None
    forms = zip(FORM_FIELDS, (json_schema, regex, grammar, chosen), strict=True)
    given = [(name, text) for name, text in forms if text is not None]
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise RequestError(f"SamplingParams.{given[1][0]}", expected=f"one of {', '.join(FORM_FIELDS)}", actual=names)
    name, text = given[0]
    if not isinstance(text, str) or not text:
        raise RequestError(f"SamplingParams.{name}", expected="a text that is not empty", actual=quoted(text))
    _check_size(name, text)
    return Form(name, text, trigger or "")


def _check_size(name: FormKind, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_FORM_BYTES:
        raise RequestError(f"SamplingParams.{name}", expected=f"at most {MAX_FORM_BYTES} bytes", actual=size)


def as_terminal(text: str) -> str:
    """Write a text as a terminal of llguidance's Lark, which takes U+007F only as an escape sequence."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def schema_text(schema: object) -> str:
    """Return the JSON schema of a dict, of a text that holds one, of a pydantic model or of a dataclass, as text.

    Raises RequestError.
    """
    if isinstance(schema, str):
        _check_size("json_schema", schema)  # parsing holds up every other thread
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _wrong(f"text that is no JSON ({error})"[:120]) from None
    elif hasattr(schema, "model_json_schema"):
        try:
            schema = schema.model_json_schema()
        except Exception as error:  # pydantic's own, for a field whose type JSON lacks
            raise _wrong(f"a model without one ({error})"[:120]) from None
    elif isinstance(schema, type) and dataclasses.is_dataclass(schema):
        schema = _of_dataclass(schema)
    if not isinstance(schema, (Mapping, bool)):
        raise _wrong(quoted(schema))
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"one that JSON cannot express ({error})"[:120]) from None


def _as_dict(value: object) -> dict[Any, Any]:
    """Return any mapping as a dict, but nothing else: dict({"id"}) is {"i": "d"}."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def choice_texts(choices: object) -> tuple[str, ...]:
    """Return the choices as a tuple. Raises RequestError unless they are one text or more, none empty."""
    if isinstance(choices, (list, tuple)) and choices and all(isinstance(each, str) and each for each in choices):
        return tuple(choices)
    expected = "a list of one text or more, none empty"
    raise RequestError("SamplingParams.choices", expected=expected, actual=quoted(choices))


def _is_valid_text(text: object) -> bool:
    """Tell whether this is a text that is not empty and has no lone surrogate, which no answer can contain."""
    return isinstance(text, str) and bool(text) and not any("\ud800" <= character <= "\udfff" for character in text)


def _wrong(actual: str) -> RequestError:
    return RequestError("SamplingParams.json_schema", expected=SCHEMA_FORMS, actual=actual)


def _of_dataclass(kind: Any, path: tuple[type, ...] = ()) -> dict[str, Any]:
    """Return the schema of a dataclass: a property for each field, required unless it has a default."""
    if kind in path:
        raise _wrong(f"the recursive dataclass {kind.__name__}")
    try:
        hints = typing.get_type_hints(kind)
    except Exception as error:  # for a type's name that the dataclass's module lacks
        raise _wrong(f"the dataclass {kind.__name__}, whose types cannot be read ({error})"[:160]) from None
    fields = [field for field in dataclasses.fields(kind) if field.init]
    missing = dataclasses.MISSING
    return {
        "type": "object",
        "properties": {field.name: _of_type(hints[field.name], (*path, kind)) for field in fields},
        "required": [field.name for field in fields if field.default is missing and field.default_factory is missing],
        "additionalProperties": False,
    }


def _of_type(hint: Any, path: tuple[type, ...]) -> dict[str, Any]:
    """Return the schema of a type hint. Raises RequestError for a type whose values JSON cannot express."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_type(each, path) for each in args]}
    kind = origin or hint
    if kind in _ARRAYS or (kind is tuple and args[1:] == (...,)):
        return {"type": "array", "items": _of_type(args[0] if args else Any, path)}
    if kind in (dict, Mapping) and args[:1] in ((), (str,)):
        return {"type": "object", "additionalProperties": _of_type(args[1] if args else Any, path)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _of_dataclass(hint, path)
    raise _wrong(f"a dataclass with a field of type {hint!r}"[:120])
