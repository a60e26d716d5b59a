"""Strings that a schema restricts, in MiniCPM5's calls: the parser gives back what the grammar accepts."""

from __future__ import annotations

import json
from time import perf_counter

import jsonschema
import pytest

from cpmrt import LLM, SamplingParams
from cpmrt.errors import FormError
from cpmrt.grammar import Thought
from cpmrt.tool_use.finder import calls_in
from cpmrt.tool_use.formats import XML
from cpmrt.tool_use.grammars import grammar_of
from cpmrt.tool_use.text_patterns import expression_of

pytest.importorskip("llguidance")
CASES = [
    ({"pattern": r"^https?:\/\/[a-z]+$"}, ["https://a"], ["https:a", "xhttp://a"]),
    ({"pattern": "^https?://[a-z]+$", "maxLength": 9}, ["http://ab"], ["http://abc", "ftp://a"]),
    ({"pattern": r"^[0-9]{1,3}\$"}, ["12$", "12$ or so"], ["12", "1234$"]),
    ({"pattern": r"^\S+\\$"}, ["C:\\"], ["C:", "C:\\x"]),
    ({"pattern": "^[0-9]+$", "minLength": 3}, ["123", "1234567"], ["12"]),
    ({"pattern": "^a+$|b$"}, ["aa", "xb"], ["ax", "bx"]),
    ({"pattern": r"a[|)/]|^\|"}, ["xa|", "a)", "a/b", "|x"], ["a", "x|"]),
    ({"pattern": "^a\nb/?$"}, ["a\nb", "a\nb/"], ["a\nc"]),
    ({"pattern": r"^\[.*\]$"}, ["[a]", "[[a]]"], ["a", "[a"]),
    ({"minLength": 5000}, ["x" * 5000], ["x" * 4999]),
    ({"maxLength": 3}, ["", "a <", "abc"], ["abcd"]),
    ({"format": "date"}, ["2028-02-29"], ["2028-2-29", "2028-02-30", "", "today"]),
    ({"format": "time"}, ["10:20:30Z", "23:59:59.5+01:00"], ["24:00:00Z", "10:20"]),
    ({"format": "date-time"}, ["2028-02-29T10:20:30Z"], ["2028-02-29", "2028-02-29 10:20:30Z"]),
    ({"format": "duration"}, ["P1Y2M3D", "P1DT2H", "PT5S", "P3W"], ["P", "PT", "P1DT", "P1S"]),
    ({"format": "email"}, ["a.b+c@example.org"], ["a", "@b", ".a@b"]),
    ({"format": "email", "maxLength": 5}, ["a@b.c"], ["a@b.cd"]),
    ({"format": "hostname"}, ["a", "a-b.example.org"], ["", "-a", "a-"]),
    ({"format": "ipv4"}, ["0.0.0.0", "255.1.99.100"], ["256.1.1.1", "1.2.3"]),
    ({"format": "ipv6"}, ["::", "::1", "fe80::1:2", "1::", "1:2:3:4:5:6:7:8"], [":", "1:2:3", "1::2::3"]),
    ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"format": "uri"}, ["https://a.b/c?d=%20#e", "mailto:a@b"], ["a b", "//a"]),
    ({"format": "of our own"}, ["", "anything"], []),
    ({"format": ["date"]}, ["", "anything"], []),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_context=256) as llm:
        yield llm


def accepts(llm, tools, text):
    params = SamplingParams(grammar=grammar_of(XML, tools, llm.tokenizer, one_call=True))
    matcher = llm.maker.forms.grammars.matcher(params.form, Thought())()
    try:
        matcher.accept([*llm.tokenizer.encode(text, add_special_tokens=False), llm.tokenizer.eos_token_ids[0]])
    except FormError:
        return False
    return True


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda case: str(case)[:60])
def test_texts_are_those_that_their_schema_allows(llm, schema, good, bad):
    tools = {"f": {"type": "object", "properties": {"x": {"type": "string", **schema}}, "required": ["x"]}}
    for value in (*good, *bad):
        call = f'<function name="f"><param name="x"><![CDATA[{value}]]></param></function>'
        assert accepts(llm, tools, call) == (value in good), value
        if value in good:
            ((_, arguments),) = calls_in(call, tools)
            assert json.loads(arguments) == {"x": value}
            if not isinstance(schema.get("format"), list):  # a validator refuses such a schema
                jsonschema.validate({"x": value}, tools["f"], jsonschema.Draft202012Validator)


@pytest.mark.parametrize("part", ["[", "[a|", "(", "\\", "|", "$"])
def test_a_pattern_that_goes_on_and_on_is_soon_written(part):
    begun = perf_counter()
    expression_of({"pattern": part * (60_000 // len(part))}, 10)
    assert perf_counter() - begun < 5


def test_a_text_ends_where_its_cdata_does(llm):
    tools = {"f": {"type": "object", "properties": {"x": {"type": "string", "pattern": "^.{6,}$"}}, "required": ["x"]}}
    assert not accepts(llm, tools, '<function name="f"><param name="x"><![CDATA[a]]>bcdef]]></param></function>')


@pytest.mark.parametrize("schema", [
    {"enum": ["1", "2"]}, {"const": "true"}, {"enum": ["a <]]> b"]}, {"enum": ["a]]>"]},
    {"type": "object", "properties": {"a": {"const": "]]></param>"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"const": "]]>"}, "minItems": 2, "maxItems": 2},
], ids=str)  # fmt: skip
def test_values_that_look_like_others_come_back(llm, schema):
    tools = {"f": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    params = SamplingParams(grammar=grammar_of(XML, tools, llm.tokenizer, one_call=True), max_new_tokens=100)
    ((_, arguments),) = calls_in(llm.generate("f: ", params).text, tools)
    jsonschema.validate(json.loads(arguments), tools["f"], jsonschema.Draft202012Validator)
