"""Numbers in schemas that floats cannot hold: they are kept exactly or refused, never changed."""

from __future__ import annotations

import json

import pytest

from cpmrt import RequestError, SamplingParams
from cpmrt.answer_forms import AnswerForms
from cpmrt.grammar import Grammars
from cpmrt.text import Tokenizer
from cpmrt.tool_use.formats import FORMATS
from cpmrt.weights.model_folder import ModelFolder

pytest.importorskip("llguidance")
INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
REFUSED = [
    {"enum": [1234567890123456789]}, {"const": 2**53 + 1}, {"const": -(2**53) - 1}, {"const": {"a": [2**60 + 1]}},
    {"const": 2**64 - 1}, {"const": 2**63}, {"const": -(2**63)}, {"const": 1 - 2**63}, {"enum": [10**30 + 1, "a"]},
    {**INTEGER, "minimum": 2**53 + 1}, {**NUMBER, "maximum": 2**60},
    {**INTEGER, "minimum": 0, "exclusiveMaximum": 2**60}, {**INTEGER, "exclusiveMinimum": 2**53},
    {**INTEGER, "multipleOf": 2**53 + 1}, {**INTEGER, "minimum": -1e19, "maximum": -1e19},
    {"anyOf": [{"type": "object", "properties": {"id": {"enum": [2**60 + 1]}}}, {"type": "null"}]},
    {"$ref": "#/default", "default": {"const": -(2**63)}},
]  # fmt: skip
KEPT = [
    ({"const": 2**53}, [2**53], [2**53 + 1]), ({"enum": [2**60, -(2**60)]}, [2**60, -(2**60)], [2**60 + 1]),
    ({"const": 2**63 - 1}, [2**63 - 1], [2**63]),
    ({**INTEGER, "minimum": 0, "maximum": 2**63 - 1}, [0, 2**63 - 1, 2**63], [-1]),
    ({**INTEGER, "minimum": -(2**62), "maximum": 2**60}, [-(2**62), 2**60], [-(2**62) - 1, 2**60 + 1]),
    ({**INTEGER, "exclusiveMaximum": 2**53 - 1, "minimum": -(2**53)}, [2**53 - 2, -(2**53)], [2**53 - 1]),
    ({**INTEGER, "default": 2**60 + 1}, [2**60 + 1], []),
]  # fmt: skip


@pytest.fixture(scope="module")
def forms():
    tokenizer = Tokenizer.open(ModelFolder.open(None).path)
    return AnswerForms(tokenizer, None, tokenizer.eos_token_ids)


def allows(grammars: Grammars, params: SamplingParams, text: str) -> bool:
    matcher, tokens = grammars._compile(params.form), grammars._vocabulary.spelled(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("schema", REFUSED, ids=str)
def test_a_number_that_would_change_is_refused(forms, schema):
    wanted = r"the number -?[\d.e+]+ in \w+, which would lose digits: use a string"
    for params in (
        SamplingParams(json_schema=schema),
        SamplingParams(grammar=f'start: "x" item\nitem: %json\n {json.dumps(schema)} "y"'),
    ):
        with pytest.raises(RequestError, match=wanted):
            forms.grammars.matcher(params.form)


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), KEPT, ids=str)
def test_a_number_that_does_not_change_is_kept(forms, schema, allowed, forbidden):
    params = SamplingParams(json_schema=schema)
    found = {number: allows(forms.grammars, params, str(number)) for number in (*allowed, *forbidden)}
    assert found == dict.fromkeys(allowed, True) | dict.fromkeys(forbidden, False)


@pytest.mark.parametrize("schema", [{"const": 1e30}, {"enum": [1.5, 1e16]}, {**NUMBER, "maximum": 1e18}], ids=str)
def test_floats_are_left_as_they_are(forms, schema):
    assert forms.grammars.matcher(SamplingParams(json_schema=schema).form)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_the_tool_with_such_a_number_is_named(forms, form, monkeypatch):
    monkeypatch.setattr("cpmrt.answer_forms.format_of", lambda template: form)
    good, bad = {"properties": {"id": INTEGER}}, {"properties": {"id": {"enum": [2**60 + 1]}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}
             for name, schema in (("f", good), ("g", bad))]  # fmt: skip
    with pytest.raises(RequestError, match=rf"^tools\[1\].*'g'.*the number {2**60 + 1} in enum") as caught:
        forms.calling(SamplingParams(), tools, ("f", "g"), one_call=True, is_free=False)
    assert "rammar" not in str(caught.value)


def test_the_schema_of_an_answer_that_may_call_is_named(forms):
    tools = [{"type": "function", "function": {"name": "f"}}]
    params = SamplingParams(json_schema={"const": 2**60 + 1})
    with pytest.raises(RequestError, match=rf"^SamplingParams.json_schema: .* the number {2**60 + 1} in const"):
        forms.calling(params, tools, ("f",), one_call=True, is_free=False)
