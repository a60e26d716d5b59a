"""Refusals that the history of a chat has, as parts or as a field of their own: templates know text alone."""

from __future__ import annotations

from typing import Any

from cpmrt.server.errors import invalid
from cpmrt.server.json_body import shown


def with_refusals_as_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message of the assistant whose refusals are parts of its text. Raises ApiError 400."""
    content, refusal = message.get("content"), message.get("refusal")
    if isinstance(content, list):
        content = [_as_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    if refusal is not None:
        text = _text(refusal, f"{where}.refusal")
        if isinstance(content, list):
            content = [*content, {"type": "text", "text": text}]
        elif content is None or isinstance(content, str):
            content = (content or "") + text
    return {name: value for name, value in message.items() if name != "refusal"} | {"content": content}


def _as_text(part: Any, where: str) -> Any:
    """Return a refusal as a part with text, any other part as it is."""
    if not isinstance(part, dict) or part.get("type") != "refusal":
        return part
    return {"type": "text", "text": _text(part.get("refusal"), f"{where}.refusal")}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise invalid(where, f"expected a string, got {shown(value)}")
    return value
