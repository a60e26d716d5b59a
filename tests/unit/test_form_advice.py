"""Forms that are too complex for their first tokens already are refused, and the error says what to change."""

import pytest

from cpmrt import LLM, FormError, RequestError, SamplingParams

pytest.importorskip("llguidance")
OPTIONAL = {"type": "object", "additionalProperties": False}
OPTIONAL["properties"] = {f"p{number}": {"type": "null"} for number in range(2600)}

LATER = {"type": "object", "required": ["a", "b"], "properties": {"a": {"type": "boolean"}, "b": OPTIONAL}}


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_context=256) as llm:
        yield llm


@pytest.mark.parametrize(("form", "fix"), [
    ({"regex": "a{100000}"}, "repeat less often"),
    ({"choices": [str(number) for number in range(20000)]}, "name fewer alternatives, or shorter ones"),
    ({"json_schema": OPTIONAL}, "fewer optional properties"),
])  # fmt: skip
def test_what_fails_at_the_first_tokens_is_refused_before(llm, form, fix):
    with pytest.raises(RequestError, match=f"SamplingParams.*; .*{fix}") as caught:
        llm.generate("x", SamplingParams(**form))
    assert caught.value.fix


@pytest.mark.parametrize(("form", "fix"), [
    ({"regex": "[ab]a{100000}"}, "repeat less often"),
    ({"json_schema": LATER}, "fewer optional"),
])  # fmt: skip
def test_what_fails_later_says_what_to_change(llm, form, fix):
    with pytest.raises(FormError, match=f"; .*{fix}"):
        llm.generate("x", SamplingParams(**form, max_new_tokens=60))


def test_a_tool_that_is_too_deep_says_what_to_change_too(llm):
    levels = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(600)}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": levels | {"d600": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(RequestError, match="tools: .*at most 500 levels.*; write rules out"):
        llm.chat([{"role": "user", "content": "x"}], tools=[tool], tool_choice="required")
