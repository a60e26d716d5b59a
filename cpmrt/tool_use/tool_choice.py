"""Reads which of its tools an answer must call, and which it may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cpmrt.errors import RequestError, quoted

ToolChoice = str | Mapping[str, Any] | None
"""A word, a tool's name, or an object as the OpenAI API has it; None stands for auto."""
_WORDS = ("auto", "none", "required")


class ChosenTools(NamedTuple):
    """The names of tools of which an answer must call one, and of those that it may call: none stands for all.

    `is_single`: a tool is named to be called, once.
    """

    called: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    is_single: bool = False


def choice_by_name(choice: ToolChoice, names: Sequence[str]) -> ChosenTools:
    """Read a choice that may also be the bare name of a tool, among tools of these names. Raises RequestError."""
    if not names and choice not in (None, "auto", "none"):
        raise RequestError("tool_choice", expected="auto or none without tools", actual=quoted(choice))
    is_name = isinstance(choice, str) and choice not in _WORDS
    return read_tool_choice({"type": "function", "function": {"name": choice}} if is_name else choice, names)


def read_tool_choice(choice: object, names: Sequence[str]) -> ChosenTools:
    """Read a choice in the OpenAI API's form, among tools of these names. Raises RequestError naming the field."""
    if choice in (None, "none", "auto"):
        return ChosenTools()
    if choice == "required":
        return ChosenTools(tuple(names))
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), names)
    name = _name(choice)
    if name not in names:
        expected = "auto, none, required, one of the tools by its name, or allowed_tools"
        raise RequestError("tool_choice", expected=expected, actual=quoted(choice if name is None else name))
    return ChosenTools((str(name),), is_single=True)


def _allowed(among: object, names: Sequence[str]) -> ChosenTools:
    """Read a choice among some of the tools, at will or one at least."""
    where = "tool_choice.allowed_tools"
    if not isinstance(among, Mapping):
        raise RequestError(where, expected="an object with mode and tools", actual=quoted(among))
    mode, tools = among.get("mode"), among.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"{where}.mode", expected="auto or required", actual=quoted(mode))
    if not isinstance(tools, (list, tuple)) or not tools:
        raise RequestError(f"{where}.tools", expected="an array of at least one tool", actual=quoted(tools))
    allowed = dict[str, None]()
    for index, tool in enumerate(tools):
        name = _name(tool)
        if name not in names:
            expected = "one of the tools by its name"
            actual = quoted(tool if name is None else name)
            raise RequestError(f"{where}.tools[{index}]", expected=expected, actual=actual)
        allowed[str(name)] = None
    return ChosenTools(tuple(allowed) if mode == "required" else (), tuple(allowed))


def _name(choice: object) -> object:
    """Return the name in {"type": "function", "function": {"name": ...}}; None for anything else."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    return function.get("name") if isinstance(function, Mapping) else None
