"""Errors about requests in the words of clients over HTTP, who know neither Python nor the options of the server."""

from __future__ import annotations

import re

from cpmrt.config.form import SCHEMA_FORMS
from cpmrt.errors import SHORTEN_PROMPT, RequestError

API_NAMES = {"max_new_tokens": "max_tokens", "logprobs": "top_logprobs"}
"""Fields of SamplingParams that the API has by another name."""
_WORDS = {
    SCHEMA_FORMS: "a JSON schema: an object, or its JSON text",
    SHORTEN_PROMPT: "send a shorter input: the server was started with this context",
}
_ONE_OF_SEVERAL = re.compile(r"(\w+\[\d+\]: )prompt: ")
_PYTHON_VALUE = re.compile(r"None|True|False|[\[{(].*", re.DOTALL)
_CONSTANT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\b(?:None|True|False)\b""")
"""A string, which stays as it is, or a constant that JSON has by another name."""
_CONSTANTS = {"None": "null", "True": "true", "False": "false"}


def message_for_clients(error: RequestError) -> str:
    """Return the error's message with fields named as the API has them, and values written as JSON has them."""
    what, expected, actual, fix = error.what, error.expected, error.actual, error.fix
    if what.startswith("SamplingParams."):
        name, *more = what.removeprefix("SamplingParams.").split(" ", 1)
        what = " ".join([API_NAMES.get(name, name), *more])
    what = _ONE_OF_SEVERAL.sub(r"\1", what, 1)  # the place in the field says that it is a prompt
    if isinstance(expected, str):
        expected = _json_constants(_WORDS.get(expected, expected))
    if isinstance(actual, str) and _PYTHON_VALUE.fullmatch(actual):
        actual = _json_constants(actual)
    return str(RequestError(what, expected=expected, actual=actual, fix=_WORDS.get(fix, fix) if fix else None))


def _json_constants(text: str) -> str:
    """Write the constants of Python in a text, except in quotation marks, as JSON has them."""
    return _CONSTANT.sub(lambda found: _CONSTANTS.get(found[0], found[0]), text)
