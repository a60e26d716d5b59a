"""Thoughts and tool calls in an answer's text: each format, however the text is cut into pieces."""

from __future__ import annotations

import json
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import least_cpu_seconds, slowness

from cpmrt.server.chat_text import ChatText, Message
from cpmrt.text.markers import THINKING_PAIRS
from cpmrt.text.thinking import open_marker
from cpmrt.tool_use.finder import CallFinder
from cpmrt.tool_use.formats import read_json_call, read_python_calls, read_xml_call

SCHEMAS = {
    "f": {
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["string", "null"]}, "z": {}}
    },
    "g": {},
    "listed": {
        "properties": {
            "a": {"enum": ["1", "2"]}, "b": {"const": "true"}, "c": {"type": ["string", "integer"], "enum": ["1", "2"]},
            "d": {"enum": ["x", 1]},
        }
    },
    "needy": {"properties": {"a": {}, "b": {}}, "required": ["a"]},
}
MARKS = [
    "<think>", "</think>", "<|thought_start|>", "<|thought_end|>", "<tool_call>", "</tool_call>",
    '{"name": "f", "arguments": {"a": 1}}', "<|tool_call_start|>", "<|tool_call_end|>",
    "```python\n", "\n```", "f(a=1)", '<function name="f">', "</function>", '<param name="a">', "1", "</param>", " ",
    "\n", "text", "<", "<t", "<|t", "é", "<![CDATA[", "]]>", "]", '<param name="b"><![CDATA[</function></param>', '"',
    '"</tool_call>', "\\", "'", "'<|tool_call_end|>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(MARKS), max_size=14).map("".join)


def message(pieces, *, thought_end=None, schemas=SCHEMAS):
    text = ChatText(thought_end, schemas)
    whole = Message()
    for piece in pieces:
        whole.add(text.push(piece))
    whole.add(text.flush())
    made = whole.content()
    for call in made.get("tool_calls", ()):
        assert call.pop("id").startswith("call_") and call.pop("type") == "function"
    return made


def test_a_call_of_a_tool_that_is_not_allowed_is_text():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for allowed in (True, False):
        text, whole = ChatText(None, {"f" if allowed else "g": {}}, only_known=True), Message()
        whole.add(text.push(call) + text.flush())
        assert text.has_calls is allowed and whole.content()["content"] == (None if allowed else call)


def cut(text, places):
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@given(TEXTS, st.lists(st.integers(0, 500), max_size=30), st.sampled_from([None, "</think>", "<|thought_end|>"]))
def test_where_the_text_is_cut_makes_no_difference(text, places, thought_end):
    assert message(cut(text, places), thought_end=thought_end) == message([text], thought_end=thought_end)


@given(TEXTS)
def test_without_thoughts_and_tools_text_stays_as_it_is(text):
    text = "x" + text
    assert message([text], schemas=None) == {"role": "assistant", "content": text, "refusal": None}


@given(TEXTS)
def test_without_calls_no_visible_text_is_lost(text):
    made = message(["x" + text])
    if "tool_calls" not in made:
        assert made["content"] == "x" + text


@pytest.mark.parametrize(("text", "thoughts", "content"), [
    ("<think>a</think>b", "a", "b"),
    ("\n<think>\na\n\nb\n</think>\n\n b", "a\n\nb", "b"),
    ("<|thought_start|>\na\n<|thought_end|>\nb", "a", "b"),
    ("<think></think>b", None, "b"),
    ("<think>never closed", "never closed", ""), ("<think>cut off \n\n", "cut off", ""),
    ("b <think>a</think>", None, "b <think>a</think>"),
    ("<thin", None, "<thin"),
    ("<thinking>", None, "<thinking>"),
])  # fmt: skip
def test_thoughts(text, thoughts, content):
    made = message(list(text), schemas=None)
    assert (made.get("reasoning_content"), made["content"]) == (thoughts, content)


@pytest.mark.parametrize(("opening", "closing"), THINKING_PAIRS.items())
def test_a_prompt_that_opens_a_thought(opening, closing):
    assert open_marker(f"{opening}\n\n{closing}\n\n", "") is None
    thought_end = open_marker(f"<|im_start|>assistant\n{opening}\n", "")
    made = message([f"a{closing}", "b"], thought_end=thought_end)
    assert (made["reasoning_content"], made["content"]) == ("a", "b")


@pytest.mark.parametrize(("text", "calls"), [
    ("```python\nf(1, b='x')\n```", [("f", {"a": 1, "b": "x"})]),
    ("f(a=-1.5)\ng()", [("f", {"a": -1.5}), ("g", {})]),
    ("f(a=[1, {'k': (2, None)}], b=true)", [("f", {"a": [1, {"k": [2, None]}], "b": True})]),
    ("a.b.c(x=False)", [("a.b.c", {"x": False})]),
    ("f(a=1, a=2, b={'k': [-1e999], 'l': 0, 'k': 3})", [("f", {"a": 1, "b": {"k": [-sys.float_info.max], "l": 0}})]),
])  # fmt: skip
def test_python_calls(text, calls):
    assert [(call.name, json.loads(call.arguments)) for call in read_python_calls(text, SCHEMAS)] == calls


@pytest.mark.parametrize("text", [
    "", "x = 1", "f(a=__import__('os'))", "f(a=open('/etc/passwd').read())", "f(a=[1 for _ in b])", "f(*x)", "f(**x)",
    "f(**{'a': 1})", "f(1, 2, 3, 4, 5)", "f(lambda: 1)",
    "(lambda: 1)()", "f(a=1j)", "f(a=b'x')", "f(a={1, 2})", "f(a=1" + "0" * 5000 + ")",
    "f(a=" + "(" * 500 + ")" * 500 + ")", "f(a=" + "-" * 100_000 + "1)", "f(" + "a." * 100_000 + "b)",
    "import os", "f(a={**x})", "f(a={(1, 2): 3})", "f(\x00)",
    "f(a=-True)", "f(a=--1)", "f(a={[]: 1})", "f(b=f'x')", "f(a=" + "-" * 2_900 + "1)", "f(a=" + "[" * 190,
])  # fmt: skip
def test_python_that_is_no_call_with_literals_is_refused_and_never_run(text):
    with pytest.raises(ValueError):
        read_python_calls(text, SCHEMAS)


MUCH_CODE = {
    "numbers": "1, " * 2**17, "lists": "[], " * 2**17, "strings": "'a' " * 2**17,
    "f-strings": "f'" + "{1}" * 2**16 + "'", "raw f-strings": "rF'''" + "{1}" * 2**16 + "'''",
    "a comment": "#'\n" + "1, " * 2**17, "a triple comment": "#'''\n" + "1, " * 2**17, "quotations": "'', 1, " * 2**16,
}  # fmt: skip


@pytest.mark.parametrize("name", MUCH_CODE)
def test_more_code_than_a_call_needs_is_soon_refused(name):
    code = f"[{MUCH_CODE[name]}]"
    python = f"<|tool_call_start|>f(z={code})<|tool_call_end|>"
    pieces = [python, f'<function name="f"><param name="z">{code}</param></function>']
    enough = 0.3 * slowness(time.process_time)
    assert least_cpu_seconds(lambda: message(pieces), enough, tries=2) < enough
    made = message(pieces)
    assert made["content"] == python
    assert [json.loads(call["function"]["arguments"]) for call in made["tool_calls"]] == [{"z": code}]


def test_text_in_quotation_marks_may_be_long():
    whole, single, double = "\"it''s\" [1], \n\\" * 50_000, 'a ""b"", # ' * 50_000, "it's, [\\\\] " * 50_000
    code = f"f(a={whole!r}, # it's\n b='''{single}''', c=\"\"\"{double}\"\"\", z=r'{double[:2]}')"
    code = code.replace("r'it'", "r'\\''")
    ((_, arguments),) = read_python_calls(code, SCHEMAS)
    expected = {"a": whole, "b": single, "c": double.replace("\\\\", "\\"), "z": "\\'"}
    assert len(code) > 1_500_000 and json.loads(arguments) == expected


@pytest.mark.parametrize("text", [
    "", "[", "{}", '{"name": 1}', '{"name": "f", "arguments": 3}', "[" * 100_000, "NaN",
    json.dumps({"name": "f", "arguments": "[" * 100_000}), json.dumps({"name": "f", "arguments": "{"}),
])  # fmt: skip
def test_json_that_is_no_call_is_refused(text):
    with pytest.raises(ValueError):
        read_json_call(text, SCHEMAS)


def test_json_calls():
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert read_json_call(text, SCHEMAS) == [("f", '{"a": 1}'), ("g", "{}")]
    assert read_json_call('{"name": "f", "arguments": "{\\"a\\": 1}"}', SCHEMAS) == [("f", '{"a": 1}')]


@pytest.mark.parametrize(("text", "arguments"), [
    ('f"><param name="a">1</param>', {"a": 1}),
    ('f">\n<param name="b">1</param>\n', {"b": "1"}),
    ('f"><arguments>\n<param name="a">1</param></arguments>', {"a": 1}),
    ('f"><param name="b"><![CDATA[a < b & c\n]]></param>', {"b": "a < b & c\n"}),
    ('f"><param name="b">\n<![CDATA[ <p>x</param></function> ]]>\n</param>', {"b": " <p>x</param></function> "}),
    ('f"><param name="b"><![CDATA[a]]]]><![CDATA[>b]]></param>', {"b": "a]]>b"}),
    ('f"><param name="b">1 <![CDATA[<]]> 2 </param>', {"b": "1 < 2"}),
    ('f"><param name="b">\n a &lt; b\n</param>', {"b": "a < b"}),
    ('f"><param name="b">True</param>', {"b": "True"}),
    ('f"><param name="a">True</param><param name="z"> None </param>', {"a": True, "z": None}),
    ('f"><param name="z">[1, 2]</param>', {"z": [1, 2]}),
    ('f"><param name="z">[\'x\', (1, False)]</param>', {"z": ["x", [1, False]]}),
    ('f"><param name="z">so so</param>', {"z": "so so"}),
    ('f"><param name="z">{1, 2}</param>', {"z": "{1, 2}"}),
    ('f"><param name="z">__import__("os")</param>', {"z": '__import__("os")'}),
    ('f"><param name="a">NaN</param><param name="z">1e999</param>', {"a": "NaN", "z": sys.float_info.max}),
    ('f"><param name="z">{"k": [-1e999], "k": 3}</param>', {"z": {"k": [-sys.float_info.max]}}),
    ('f"><param name="z"><![CDATA[{"a": ["]]>", "\\""]}]]></param><param name="a">1</param>',
     {"z": {"a": ["]]>", '"']}, "a": 1}),
    ('f"><param name="z">\n<![CDATA[["]]>\n</param>', {"z": '["'}),
    ('f"><param name="z">x<![CDATA["]]>"]]></param>', {"z": 'x""]]>'}),
    ('f"><param name="b"><![CDATA["]]>"</param>', {"b": '""'}),
    ('f"><param name="c">null</param>', {"c": None}),
    ('f"><param name="c">12</param>', {"c": "12"}),
    ('listed"><param name="a">1</param><param name="b">true</param>', {"a": "1", "b": "true"}),
    ('listed"><param name="c">1</param><param name="d">1</param>', {"c": "1", "d": 1}),
    ('g"><param name="any">1</param>', {"any": 1}),
    ('g">', {}),
    ('needy"><param name="a">1</param>', {"a": 1}),
])  # fmt: skip
def test_xml_calls(text, arguments):
    ((name, written),) = read_xml_call(text, SCHEMAS)
    assert (name, json.loads(written)) == (text.partition('"')[0], arguments)
    made = message(list(f'<function name="{text}</function> after'))
    assert [call["function"] for call in made["tool_calls"]] == [{"name": name, "arguments": written}]
    assert made["content"] == " after"


def test_a_value_of_many_parts_is_soon_read():
    begun = time.perf_counter()
    ((_, written),) = read_xml_call('f"><param name="z">' + "<![CDATA[x]]>" * 80_000 + "</param>", SCHEMAS)
    assert json.loads(written) == {"z": "x" * 80_000} and time.perf_counter() - begun < 3


@pytest.mark.parametrize("text", [
    "", 'f">text', 'f"<param>', 'f"><param name="a">1', 'h"><param name="a">1</param>',
    'f"><param name="unknown">1</param>', 'f"><param name="a">1</param><param name="a">1</param>', 'needy">',
    'f"><param name="b"><![CDATA[</param>', 'f"><param name="a">1</param>text',
])  # fmt: skip
def test_xml_that_is_no_call_is_refused_and_shown(text):
    with pytest.raises(ValueError):
        read_xml_call(text, SCHEMAS)
    text = f'<function name="{text}</function> after'
    assert message(list(text)) == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize(("start", "end", "call"), [
    ("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"b": "\\"</tool_call>"}}'),
    ("<|tool_call_start|>", "<|tool_call_end|>", "f(b='<|tool_call_end|>', z=\"it's<|tool_call_end|>\")"),
    ('<function name="', "</function>", 'f"><param name="b"><![CDATA[</function>]]></param>'),
])  # fmt: skip
def test_a_quoted_end_marker_is_no_end(start, end, call):
    made = message(list(f"{start}{call}{end}{start}{call}{end}done"))
    assert len(made["tool_calls"]) == 2 and made["content"] == "done"
    assert end in str(json.loads(made["tool_calls"][0]["function"]["arguments"]).values())


def test_a_quotation_that_never_ends_spoils_no_other_call():
    good = '<function name="f"><param name="a">1</param></function>'
    made = message([f'<function name="f"><param name="b"><![CDATA[x</param></function>{good}'])
    assert len(made["tool_calls"]) == 1 and made["content"].endswith("<![CDATA[x</param></function>")


def test_the_end_of_a_long_answer_costs_little():
    text = '<function name="<![CDATA[</function>' * 10_000
    begin = time.perf_counter()
    assert message([text])["content"] == text and time.perf_counter() - begin < 10


def test_a_call_without_its_end_counts():
    made = message(['x <tool_call>\n{"name": "f", "arguments": {}}'])
    assert made["tool_calls"] == [{"function": {"name": "f", "arguments": "{}"}}] and made["content"] == "x"


def test_a_block_that_is_no_call_is_shown():
    made = message(["<tool_call>oh</tool_call> well"])
    assert made["content"] == "<tool_call>oh</tool_call> well" and "tool_calls" not in made


def test_white_space_behind_the_last_call_is_dropped():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert message(list(f"so {call}\n\n"))["content"] == "so"
    assert message(list("so \n"))["content"] == "so \n"


def test_a_call_that_never_ends_is_given_up():
    begun = "<tool_call>" + "x" * 2**20
    assert CallFinder({}).push(begun) == (begun, []), "as soon as it is too long"
    text = "<tool_call>" + "x" * (2**20 + 1) + "</tool_call>y"
    assert message([text])["content"] == message([text[: 2**20], text[2**20 :]])["content"] == text
