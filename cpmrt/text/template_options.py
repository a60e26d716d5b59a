"""Checks the options of a chat template that callers pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmrt.errors import RequestError, quoted

_RESERVED = ("messages", "tools", "add_generation_prompt")


def check_switch(name: str, value: object) -> None:
    """Raise RequestError for a value that is not a bool: the text "false" would count as true."""
    if not isinstance(value, bool):
        raise RequestError(name, expected="True | False", actual=quoted(value))


def template_variables(template_kwargs: object) -> dict[str, Any]:
    """Return the variables that a caller sets for the template. Raises RequestError for names that are taken."""
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, Mapping) or not all(isinstance(name, str) for name in template_kwargs):
        actual = quoted(template_kwargs)
        raise RequestError("template_kwargs", expected="a dict of the template's variables", actual=actual)
    for name in _RESERVED:
        if name in template_kwargs:
            raise RequestError(f"template_kwargs: {name} is an argument of its own", fix=f"pass {name}=...")
    return dict(template_kwargs)
