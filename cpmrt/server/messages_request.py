"""Requests of Anthropic's Messages API as the messages, tools and settings that chat templates and the engine take.

Every function raises ApiError 400 naming the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cpmrt.server.errors import ApiError, invalid, unsupported
from cpmrt.server.json_body import Fields, checked_text, shown
from cpmrt.server.schema import Wanted, check_model, given_tools, read_wanted
from cpmrt.server.unused_fields import LEAVE_OUT, REFUSED_IN_MESSAGES, check_unused

_THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
"""The types of `thinking` -> whether the model thinks first; None: the template decides."""
TOOL_NAMES = {r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema"}
"""The pattern of a tool's schema among the field names of chats -> its name in this API."""
Block = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """The parts of a request that make the prompt.

    The answer goes on after `begun`, the text of the last message if that is the assistant's; else it is empty.
    `thinks` None leaves it to the template whether the model thinks first. `called` are the names of tools of which one
    must be called, once with `one_call`.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    called: tuple[str, ...]
    one_call: bool
    thinks: bool | None
    begun: str


def read_conversation(body: dict[str, Any], models: Sequence[str]) -> Conversation:
    """Read the parts that make the prompt, for the model that is served under these names."""
    fields = Fields(body)
    check_model(fields, models)
    check_unused(fields, REFUSED_IN_MESSAGES)
    output = fields.object("output_config")
    if output is not None and output.raw("format") is not None:
        raise unsupported("output_config.format", LEAVE_OUT)
    turns = fields.array("messages")
    if not turns:
        raise invalid("messages", f"expected an array of at least one message, got {shown(turns)}")
    messages = _system(fields.raw("system"))
    for index, turn in enumerate(turns):
        messages += _turn(turn, f"messages[{index}]")
    begun = ""
    if messages[-1]["role"] == "assistant" and len(messages) > 1:
        last, where = messages.pop(), f"messages[{len(turns) - 1}]"
        if "tool_calls" in last:
            raise invalid(where, "expected the results of its tool calls to follow")
        if last.get("reasoning_content"):
            raise invalid(where, "expected text alone, which the answer continues; write the thought as text too")
        begun = last["content"]
    tools, choice = _tools(fields), fields.object("tool_choice") or Fields({"type": "auto"}, "tool_choice")
    called = _called(choice, tools)
    if choice.raw("type") == "none":
        tools = []
    one_call = choice.boolean("disable_parallel_tool_use") is True or choice.raw("type") == "tool"
    return Conversation(messages, tools, called, one_call, _thinks(fields.object("thinking")), begun)


def read_settings(body: dict[str, Any]) -> Wanted:
    """Read sampling, length and stream."""
    fields = Fields(body)
    max_tokens = fields.integer("max_tokens")
    if max_tokens is None:
        raise invalid("max_tokens", "expected a number of tokens, got null")
    wanted = read_wanted(fields, max_tokens, None, stop_field="stop_sequences")
    if wanted.num_choices != 1:
        raise invalid("n", "only one answer here")
    thinking = fields.object("thinking")
    budget = thinking.integer("budget_tokens") if thinking else None
    if budget is None:
        return wanted
    if budget < 1:
        raise invalid("thinking.budget_tokens", f"expected at least 1, got {budget}")
    return replace(wanted, sampling=replace(wanted.sampling, max_thinking_tokens=min(budget, max_tokens)))


def _system(value: Any) -> list[dict[str, Any]]:
    text = "\n\n".join(_text(block, f"system[{i}]") for i, block in enumerate(_blocks(value or [], "system")))
    return [{"role": "system", "content": text}] if text else []


def _blocks(content: Any, where: str) -> list[Block]:
    """Return content as blocks; a string is one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": checked_text(content, where)}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(where, f"expected a string or an array of blocks, got {shown(content)}")
    return content


def _text(block: Block, where: str) -> str:
    if block.get("type") != "text":
        raise ApiError(400, f"{where}: only text is supported, got {shown(block.get('type'))}", param=where)
    if not isinstance(block.get("text"), str):
        raise invalid(f"{where}.text", f"expected a string, got {shown(block.get('text'))}")
    return checked_text(block["text"], f"{where}.text")


def _turn(turn: Any, where: str) -> list[dict[str, Any]]:
    """Return one message as those of a template: the results of tools are messages of their own there."""
    role = turn.get("role") if isinstance(turn, dict) else None
    if role not in ("user", "assistant"):
        raise invalid(f"{where}.role", f"expected user or assistant, got {shown(role)}")
    where += ".content"
    blocks = _blocks(turn.get("content"), where)
    named = [(block, f"{where}[{index}]") for index, block in enumerate(blocks)]
    return [_assistant(named)] if role == "assistant" else _user(named)


def _assistant(blocks: list[tuple[Block, str]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_tool_call(block, where))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _user(blocks: list[tuple[Block, str]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            parts = enumerate(_blocks(block.get("content") or [], f"{where}.content"))
            text = "".join(_text(part, f"{where}.content[{index}]") for index, part in parts)
            messages.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += _text(block, where)
        else:
            messages.append({"role": "user", "content": _text(block, where)})
    return messages or [{"role": "user", "content": ""}]


def _tool_call(block: Block, where: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str):
        raise invalid(f"{where}.name", f"expected a string, got {shown(name)}")
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.input", f"expected an object, got {shown(arguments)}")
    return {"id": str(block.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Return the tools as chat templates take them."""
    tools = []
    for index, tool in enumerate(given_tools(fields)):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            raise unsupported(where, "only tools with a name and an input_schema")
        for name, kind, expected in (("name", str, "a string"), ("input_schema", dict, "an object")):
            if not isinstance(tool.get(name), kind):
                raise invalid(f"{where}.{name}", f"expected {expected}, got {shown(tool.get(name))}")
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    return tools


def _called(choice: Fields, tools: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the names of the tools of which one must be called."""
    kind, names = choice.string("type"), tuple(tool["function"]["name"] for tool in tools)
    if kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice.type", f"expected auto, any, tool or none, got {shown(kind)}")
    if kind in ("auto", "none"):
        return ()
    if not names:
        raise invalid("tool_choice", "only together with tools")
    name = choice.string("name")
    if kind == "tool" and name not in names:
        raise invalid("tool_choice.name", f"expected the name of one of the tools, got {shown(name)}")
    return names if kind == "any" else (str(name),)


def _thinks(thinking: Fields | None) -> bool | None:
    if thinking is None:
        return None
    kind = thinking.string("type") or ""
    if kind not in _THINKING:
        raise invalid("thinking.type", f"expected {', '.join(_THINKING)}, got {shown(kind)}")
    return _THINKING[kind]
