"""Tool calls that are still being written: the arguments streamed so far are a beginning of the final arguments."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.server.chat_text import ChatText
from cpmrt.tool_use.formats import FORMATS, HERMES, PYTHON, XML
from cpmrt.tool_use.growing import MAX_GROWING, growing_calls

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "count": {"type": "number"}, "open": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}}, "code": {"type": "string"},
    },
}  # fmt: skip
SCHEMAS = {"write": SCHEMA, "read": SCHEMA}
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from('\n\t"\\{}[]<>&,:😀'), max_size=12)
ARGUMENTS = st.fixed_dictionaries({}, optional={
    "text": TEXTS.filter(lambda text: text == text.strip()), "open": st.booleans(),
    "count": st.integers(-99, 10**9) | st.floats(-9, 9, width=16),
    "tags": st.lists(TEXTS, max_size=3), "code": TEXTS.map(lambda text: text.replace("]", "")),
})  # fmt: skip
CALLS = st.lists(st.tuples(st.sampled_from(sorted(SCHEMAS)), ARGUMENTS), min_size=1, max_size=3)


def dumped(value, ensure_ascii=False):
    return json.dumps(value, ensure_ascii=ensure_ascii)


def xml_value(name, value):
    if name in ("text", "code"):
        return f"<![CDATA[{value}]]>" if name == "code" or any(mark in value for mark in "<&\n") else value
    return f"<![CDATA[{dumped(value)}]]>" if isinstance(value, list) else dumped(value)


def written(form, calls, ensure_ascii):
    """Return the text of calls as a model writes them under a grammar of this form."""
    if form is HERMES:
        return "\n".join(
            f'<tool_call>\n{{"name": {dumped(name)}, "arguments": {dumped(values, ensure_ascii)}}}\n</tool_call>'
            for name, values in calls
        )
    if form is PYTHON:
        lines = (
            f"{name}({', '.join(f'{key}={dumped(value)}' for key, value in values.items())})" for name, values in calls
        )
        body = "\n".join(lines)
        return f"{form.start}\n```python\n{body}\n```\n{form.end}"
    return "".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{xml_value(key, value)}</param>' for key, value in values.items())
        + "</function>"
        for name, values in calls
    )


def pieces_of(text, seed):
    draw, at = random.Random(seed), 0
    while at < len(text):
        size = draw.choice((1, 2, 5, 30))
        yield text[at : at + size]
        at += size


def joined(deltas):
    """Join deltas: return the names and arguments of the calls, the text, and the number of argument pieces."""
    names, arguments, text, pieces = [], [], "", 0
    for delta in deltas:
        text += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(names)
                names.append(part["function"]["name"])
                arguments.append("")
            arguments[part["index"]] += part["function"]["arguments"]
            pieces += bool(part["function"]["arguments"])
    return names, arguments, text, pieces


def deltas_of(text, seed, **settings):
    chat = ChatText(None, SCHEMAS, **settings)
    return [delta for piece in pieces_of(text, seed) for delta in chat.push(piece)] + chat.flush()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
@given(calls=CALLS, seed=st.integers(0, 99), ensure_ascii=st.booleans())
def test_pieces_make_the_arguments_of_the_whole_call(form, calls, seed, ensure_ascii):
    text = "Sure. " + written(form, calls, ensure_ascii)
    names, arguments, said, _ = joined(deltas_of(text, seed))
    assert joined(deltas_of(text, seed, bound=form))[:3] == (names, arguments, said)
    if names:
        assert [json.loads(each) for each in arguments] == [values for _, values in calls]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_a_long_text_comes_in_many_pieces(form):
    values = {"open": True, "code": "def f():\n    return \"ä\\\\\"\n" * 20}
    text = written(form, [("write", values)], False)
    names, (arguments,), _, pieces = joined(deltas_of(text, 3, bound=form))
    assert names == ["write"] and json.loads(arguments) == values and pieces > 20
    assert joined(deltas_of(text, 3))[-1] == 1


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_an_answer_that_ends_within_a_call_has_what_is_there(form):
    text = written(form, [("write", {"count": 5, "code": "0123456789" * 3})], False)
    cut = text[: text.index("3456")]
    names, (arguments,), said, _ = joined(deltas_of(cut, 1, bound=form))
    assert names == ["write"] and arguments == '{"count": 5, "code": "012' and not said.strip()
    assert not joined(deltas_of(cut, 1))[0], "without a grammar it is text"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
@given(calls=CALLS, seed=st.integers(0, 99), place=st.floats(0, 1), is_called=st.booleans())
def test_a_cut_answer_is_the_same_in_a_stream_and_whole(form, calls, seed, place, is_called):
    text = written(form, calls, False)
    text = text[: round(place * len(text))]
    streamed = joined(deltas_of(text, seed, bound=form, calls_only=is_called))[:3]
    assert joined(deltas_of(text, seed, bound=form, calls_only=is_called, grows=False))[:3] == streamed
    names, arguments, said = streamed
    assert names == [name for name, _ in calls][: len(names)]
    assert not (is_called and said)
    for each, (_, values) in zip(arguments[:-1], calls, strict=False):
        assert json.loads(each) == values


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_a_call_that_is_cut_before_its_name_is_text_unless_a_call_is_wanted(form):
    text = written(form, [("write", {"count": 5})], False)
    for end in (1, len(form.start), text.index("write") + 3):
        assert joined(deltas_of(text[:end], 1, bound=form))[:3] == ([], [], text[:end])
        assert joined(deltas_of(text[:end], 1, bound=form, calls_only=True))[:3] == ([], [], "")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_where_calls_must_be_objects_a_cut_one_is_left_out(form):
    """Where arguments must be objects, a call that is cut off is neither returned nor shown as text."""
    calls = [("read", {"count": 1}), ("write", {"code": "0123456789"})]
    text = written(form, calls, False)
    settings = {"bound": form, "grows": False, "objects_only": True}
    assert joined(deltas_of(text[: text.index("456")], 1, **settings))[:3] == (["read"], ['{"count": 1}'], "")
    assert joined(deltas_of(text, 1, **settings))[0] == ["read", "write"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_quoted_markers_of_a_cut_call_begin_no_other(form):
    inner = written(form, [("read", {"count": 1})], False)
    text = written(form, [("write", {"code": f"{form.end}{inner} and more"})], False)
    for settings in ({}, {"calls_only": True}, {"grows": False}):
        names, (arguments,), said, _ = joined(deltas_of(text[: text.index(" and")], 2, bound=form, **settings))
        assert names == ["write"] and arguments.startswith('{"code": "') and not said, settings


def test_a_long_call_is_one_call_wherever_it_ends():
    values = {"code": "x" * (MAX_GROWING + 50)}
    text = written(HERMES, [("write", values)], False)
    for end in (len(text), len(text) - 40):
        pieces = [text[:100], *(text[at : min(at + 999, end)] for at in range(100, end, 999))]
        chat = ChatText(None, SCHEMAS, bound=HERMES)
        names, arguments, said, _ = joined([delta for piece in pieces for delta in chat.push(piece)] + chat.flush())
        assert names == ["write"] and not said and json.dumps(values).startswith(arguments[0])
        assert len(arguments[0]) > MAX_GROWING


def test_one_call_leaves_out_the_others():
    text = written(HERMES, [("write", {"count": 1}), ("read", {"count": 2})], False)
    assert joined(deltas_of(text, 2, bound=HERMES, one_call=True))[:2] == (["write"], ['{"count": 1}'])


def test_blocks_of_other_formats_are_read_when_they_are_whole():
    text = written(XML, [("write", {"code": "abc" * 9})], False)
    assert joined(deltas_of(text, 2, bound=HERMES)) == joined(deltas_of(text, 2))


def test_a_block_that_is_too_long_grows_no_more():
    chat = ChatText(None, SCHEMAS, bound=HERMES)
    assert chat.push('<tool_call>{"name": "write", "arguments": {"code": "' + "x" * (MAX_GROWING - 99))
    assert chat.push("x" * 99) == chat.push("x") == []


ODD_ARGUMENTS = {
    '{"x": "abc", "x": "d"}': '{"x": "abc"}',
    '{"x": "a", "count": 1, "x": "longer"}': '{"x": "a", "count": 1}',
    '{"x": {"y": 1, "y": 2}}': '{"x": {"y": 1}}',
    '{"count": 1e999, "x": [-1e999]}': '{"count": 1.7976931348623157e+308, "x": [-1.7976931348623157e+308]}',
}
"""Odd JSON that a grammar may allow, and the arguments that are made of it."""


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(("odd", "arguments"), ODD_ARGUMENTS.items())
def test_names_that_come_again_and_numbers_beyond_floats_are_the_same_in_a_stream_and_whole(odd, arguments, place):
    text = f'<tool_call>\n{{"name": "write", "arguments": {odd}}}\n</tool_call>'
    at = text.index("}", text.index(odd)) - place
    for grows in (True, False):
        chat = ChatText(None, SCHEMAS, bound=HERMES, calls_only=True, grows=grows)
        deltas = chat.push(text[:at]) + chat.push(text[at:]) + chat.flush()
        assert joined(deltas)[:3] == (["write"], [arguments], "")
        assert joined(deltas_of(text, place, bound=HERMES, grows=grows))[:3] == (["write"], [arguments], "")


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_beyond_floats_in_python_is_the_largest_float(number):
    text = f"{PYTHON.start}\n```python\nwrite(count={number})\n```\n{PYTHON.end}"
    expected = f'{{"count": {number.removesuffix("1e999")}1.7976931348623157e+308}}'
    for grows in (True, False):
        assert joined(deltas_of(text, 3, bound=PYTHON, grows=grows))[:3] == (["write"], [expected], "")


@pytest.mark.parametrize("form", [HERMES, PYTHON], ids=lambda form: form.start)
@pytest.mark.parametrize("number", ["2e-3", "2.5E-4", "-12e+25", "20.0"])
def test_a_number_is_certain_when_its_last_digit_is(form, number):
    """What JSON says for 2e-3 is 0.002, which does not begin with 2."""
    block = '{"name": "write", "arguments": {"count": @, "open": true}}' if form is HERMES else "write(count=@, open=1)"
    text = block.replace("@", number)
    (whole,) = form.read(text, SCHEMAS)
    for end in range(len(text)):
        for call in growing_calls(form, text[:end], SCHEMAS):
            assert whole.arguments.startswith(call.arguments)


def test_what_json_lacks_is_no_certain_value():
    begun = '{"name": "write", "arguments": {"x": 1, "count": Infinity}'
    assert growing_calls(HERMES, begun, SCHEMAS) == [("write", '{"x": 1')]


def test_a_parameter_of_any_value_grows_too():
    """A parameter with any schema grows too: `true`, or a malformed one, which is accepted where the model need not
    call."""
    begun = 'write"><param name="text"><![CDATA[so'
    for schema in (True, 5, ["string"]):
        (call,) = growing_calls(XML, begun, {"write": {"properties": {"text": schema}, "required": 5}})
        assert call.name == "write"
