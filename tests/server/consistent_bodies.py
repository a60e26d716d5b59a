"""A hook of schemathesis that makes request bodies consistent where JSON Schema cannot express what the server
requires.

Those are comparisons of two fields, texts in a language of their own (JSON in strings, regular expressions, grammars,
schemas), what must follow in an array, and sums. Everything else is for the document of the server to say.
"""

from __future__ import annotations

import schemathesis

FORMS = ("response_format", "structured_outputs", "json_schema", "regex", "grammar", "ebnf", "guided_json",
         "guided_regex", "guided_choice", "guided_grammar")  # fmt: skip
MOST_ANSWERS = 64


def number(value) -> float:
    return value if isinstance(value, (int, float)) else 0


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.meta.generation.mode.is_positive and isinstance(case.body, dict):
        make_consistent(case.body)


def make_consistent(body):
    for name in (*FORMS, "text"):
        body.pop(name, None)
    if "max_completion_tokens" in body:
        body.pop("max_tokens", None)
    if isinstance(body.get("tool_choice"), dict) or body.get("tool_choice") == "required":
        body.pop("tool_choice")
    bound_answers(body)
    for message in body.get("messages") or ():
        for call in message.get("tool_calls") or ():
            if isinstance(call["function"].get("arguments"), str):
                call["function"]["arguments"] = "{}"
        if isinstance(message.get("content"), list):
            message["content"] = [part for part in message["content"] if part["type"] != "tool_use"]
    if isinstance(body.get("input"), list) and any(isinstance(item, dict) for item in body["input"]):
        said = [item for item in body["input"] if item.get("type") != "reasoning"]
        body["input"] = [item | ({"arguments": "{}"} if "arguments" in item else {}) for item in said] or "x"


def bound_answers(body):
    """Make `best_of` at least `n` and not streamed, and the answers no more than the server takes at a time."""
    prompts = body.get("prompt")
    num_prompts = len(prompts) if isinstance(prompts, list) else 1
    if max(number(body.get("n")), number(body.get("best_of"))) * num_prompts > MOST_ANSWERS:
        body["n"] = 1
        body.pop("best_of", None)
    if number(body.get("best_of")) < max(1, number(body.get("n"))) or body.get("stream"):
        body.pop("best_of", None)
