"""Reads which of its tools an answer must call, and which it may call."""

from __future__ import annotations

from typing import Any, NamedTuple

from cpmrt.server.errors import invalid
from cpmrt.server.json_body import Fields, shown


class ToolChoice(NamedTuple):
    """The names of tools of which an answer must call one, and of those that it may call: none stands for all.

    `is_single`: a tool is named to be called, once.
    """

    called: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    is_single: bool = False


def read_tool_choice(fields: Fields, tools: list[dict[str, Any]]) -> ToolChoice:
    """Read `tool_choice` of a request with these tools. Raises ApiError 400."""
    choice, names = fields.raw("tool_choice"), tuple(tool["function"]["name"] for tool in tools)
    if choice in (None, "none", "auto"):
        return ToolChoice()
    if choice == "required":
        return ToolChoice(names)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(Fields(choice, "tool_choice").object("allowed_tools"), names)
    name = _name(choice)
    if name not in names:
        expected = 'expected "auto", "none", "required", or one of the tools by its name, or allowed_tools'
        raise invalid("tool_choice", expected)
    return ToolChoice((str(name),), is_single=True)


def _allowed(fields: Fields | None, names: tuple[str, ...]) -> ToolChoice:
    """Read a choice among some of the tools, at will or one at least."""
    if fields is None:
        raise invalid("tool_choice.allowed_tools", "expected an object with mode and tools")
    mode, tools = fields.string("mode"), fields.array("tools")
    if mode not in ("auto", "required"):
        raise invalid(fields.name("mode"), f"expected auto or required, got {shown(mode)}")
    if not tools:
        raise invalid(fields.name("tools"), "expected an array of at least one tool")
    allowed = dict[str, None]()
    for index, tool in enumerate(tools):
        name = _name(tool)
        if name not in names:
            where = f"{fields.name('tools')}[{index}]"
            raise invalid(where, f"expected one of the tools by its name, got {shown(name)}")
        allowed[str(name)] = None
    return ToolChoice(tuple(allowed) if mode == "required" else (), tuple(allowed))


def _name(choice: Any) -> Any:
    """Return the name in {"type": "function", "function": {"name": ...}}; None for anything else."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    return function.get("name") if isinstance(function, dict) else None
