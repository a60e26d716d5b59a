"""Tool calls of a whole answer: none is read from the thought, all are read after it, whatever their arguments say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import saying_llm

from cpmrt import SamplingParams
from cpmrt.server.chat_text import ChatText, Message
from cpmrt.text.markers import THINKING_PAIRS
from cpmrt.tool_use.calls import Schemas
from cpmrt.tool_use.finder import calls_in

SCHEMAS: Schemas = {"f": {"type": "object", "properties": {"x": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a"}}\n</tool_call>'
MARKS = [*THINKING_PAIRS, *THINKING_PAIRS.values(), CALL, " ", "\n", "text"]
CLOSINGS = st.sampled_from([None, *THINKING_PAIRS.values()])


@pytest.mark.parametrize("marker", [*THINKING_PAIRS, *THINKING_PAIRS.values()])
@pytest.mark.parametrize("call", [
    '<tool_call>\n{{"name": "f", "arguments": {{"x": "a{}b"}}}}\n</tool_call>',
    '<function name="f"><param name="x"><![CDATA[a{}b]]></param></function>',
    '<|tool_call_start|>\n```python\nf(x="a{}b")\n```\n<|tool_call_end|>',
])  # fmt: skip
def test_an_argument_may_hold_the_marker_of_a_thought(call: str, marker: str) -> None:
    written = call.format(marker)
    for answer in (written, f"<think>well</think>{written}", f"I call it.\n{written}"):
        ((name, arguments),) = calls_in(answer, SCHEMAS)
        assert (name, json.loads(arguments)) == ("f", {"x": f"a{marker}b"})


@pytest.mark.parametrize(("opening", "closing"), THINKING_PAIRS.items())
def test_a_thought_calls_nothing(opening: str, closing: str) -> None:
    assert calls_in(f"\n{opening}I could say {CALL} but", SCHEMAS) == ()
    assert calls_in(f"{opening}I could say {CALL}{closing}\nNo.", SCHEMAS) == ()
    assert calls_in(f"I could say {CALL} but", SCHEMAS, closing) == ()
    assert len(calls_in(f"I could say {CALL}{closing}{CALL}", SCHEMAS, closing)) == 1
    assert len(calls_in(f"Not a thought: {opening}{CALL}", SCHEMAS)) == 1
    other = CALL.replace('"f"', '"g"')
    assert [call.name for call in calls_in(other + CALL, SCHEMAS)] == ["g", "f"]
    assert [call.name for call in calls_in(other + CALL, SCHEMAS, only_known=True)] == ["f"]


@given(st.lists(st.sampled_from(MARKS), max_size=12).map("".join), CLOSINGS)
def test_a_server_finds_the_same(text: str, thought_end: str | None) -> None:
    served, message = ChatText(thought_end, SCHEMAS), Message()
    message.add(served.push(text))
    message.add(served.flush())
    calls = message.content().get("tool_calls", ())
    assert [call["function"]["arguments"] for call in calls] == [
        call.arguments for call in calls_in(text, SCHEMAS, thought_end)
    ]


def test_the_thought_that_a_template_opens_calls_nothing(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS["f"]}}]
    asked = [{"role": "user", "content": "?"}]
    with saying_llm(tmp_path / "model", lambda text: f"I could say {CALL}</think>\n{CALL}") as llm:
        for thinks, count in ((True, 1), (False, 2)):
            answer = llm.chat(asked, SamplingParams(max_new_tokens=None), tools=tools, enable_thinking=thinks)
            assert len(answer.tool_calls) == count, answer.text
