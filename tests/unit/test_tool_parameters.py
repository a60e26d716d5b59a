"""Tools whose parameters are described by a reference or by combined schemas, in the formats of three families."""

from __future__ import annotations

import json

import pytest

from cpmrt import RequestError, SamplingParams
from cpmrt.answer_forms import AnswerForms
from cpmrt.text import Tokenizer
from cpmrt.tool_use.calls import schemas_of
from cpmrt.tool_use.finder import calls_in
from cpmrt.tool_use.formats import FORMATS, HERMES, PYTHON, XML
from cpmrt.weights.model_folder import ModelFolder

pytest.importorskip("llguidance")
NODE = {
    "type": "object", "required": ["name", "children"],
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
}  # fmt: skip
RECURSIVE = {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}
CHAIN = {"$defs": {"a/b": {"$ref": "#/$defs/Node"}, "Node": NODE}, "description": "a tree", "$ref": "#/$defs/a~1b"}
SINGLE = {"definitions": {}, "type": "object", "allOf": [{"$ref": "#/$defs/Node"}], "$defs": {"Node": NODE}}
MERGED = {
    "properties": {"name": {"type": "string"}}, "required": ["name"],
    "allOf": [{"properties": {"children": NODE["properties"]["children"]}, "required": ["children"]}],
    "$defs": {"Node": NODE},
}  # fmt: skip
TREE = {"name": "a", "children": [{"name": "b", "children": []}]}
KIND = {"kind": {"const": "x"}}
WITH_A = {"properties": {"a": {"type": "integer"}} | KIND, "required": ["a", "kind"]}
WITH_B = {"properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False}
EITHER = {"anyOf": [WITH_A, WITH_B]}
CLASH = {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"maximum": 5}}}]}
ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


@pytest.fixture(scope="module")
def forms():
    tokenizer = Tokenizer.open(ModelFolder.open(None).path)
    return AnswerForms(tokenizer, None, tokenizer.eos_token_ids)


def tools_of(schema):
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def call_of(form, arguments):
    written = json.dumps(arguments)
    if form is HERMES:
        return f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    if form is PYTHON:
        pairs = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
        return f"<|tool_call_start|>\n```python\nf({pairs})\n```\n<|tool_call_end|>"
    bodies = {name: value if isinstance(value, str) else f"<![CDATA[{json.dumps(value)}]]>"
              for name, value in arguments.items()}  # fmt: skip
    return '<function name="f">' + "".join(f'<param name="{n}">{v}</param>' for n, v in bodies.items()) + "</function>"


def allows(forms, form, schema, arguments, monkeypatch):
    monkeypatch.setattr("cpmrt.answer_forms.format_of", lambda template: form)
    params = forms.calling(SamplingParams(), tools_of(schema), ("f",), one_call=True, is_free=False)
    matcher = forms.grammars._compile(params.form)
    tokens = forms.grammars._vocabulary.spelled(call_of(form, arguments))
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
@pytest.mark.parametrize("schema", [NODE | RECURSIVE, RECURSIVE, CHAIN, SINGLE, MERGED],
                         ids=["beside", "reference", "chain", "single", "merged"])  # fmt: skip
def test_references_and_merged_schemas_are_obeyed(forms, form, schema, monkeypatch):
    assert allows(forms, form, schema, TREE, monkeypatch)
    for wrong in ({}, {"name": "a"}, TREE | {"x": 1}, TREE | {"children": [{"name": "b"}]}):
        assert not allows(forms, form, schema, wrong, monkeypatch), wrong
    (call,) = calls_in(call_of(form, TREE), schemas_of(tools_of(schema)))
    assert json.loads(call.arguments) == TREE


def test_alternatives_are_obeyed_in_json(forms, monkeypatch):
    for arguments in ({"a": 1, "kind": "x"}, {"b": True}):
        assert allows(forms, HERMES, EITHER, arguments, monkeypatch)
    for wrong in ({}, {"a": 1}, {"a": True, "kind": "x"}, {"b": True, "c": 1}):
        assert not allows(forms, HERMES, EITHER, wrong, monkeypatch), wrong
    assert allows(forms, HERMES, CLASH, {"a": 5}, monkeypatch)
    assert not allows(forms, HERMES, CLASH, {"a": 6}, monkeypatch)


@pytest.mark.parametrize("form", [PYTHON, XML], ids=lambda form: form.start)
@pytest.mark.parametrize(("schema", "key"), [
    (EITHER, "anyOf"), (CLASH, "allOf"), (ENDLESS, r"\$ref"), ({"oneOf": [NODE]}, "oneOf"), ({"allOf": 5}, "allOf"),
    ({"$ref": "#/$defs/none"}, r"\$ref"), ({"$ref": "#/$defs/e", "$defs": {"e": EITHER}}, "anyOf"),
], ids=str)  # fmt: skip
def test_a_schema_that_has_no_list_of_parameters_is_refused(forms, form, schema, key, monkeypatch):
    said = rf"^tools\[0\].function.parameters: {key} in the schema of 'f': expected properties alone, .* list all param"
    with pytest.raises(RequestError, match=said):
        allows(forms, form, schema, {}, monkeypatch)


def test_a_call_at_will_may_have_the_parameters_of_an_alternative():
    schemas = schemas_of(tools_of({"properties": KIND, **EITHER}))
    (call,) = calls_in(call_of(XML, {"kind": "x", "a": 1}), schemas)
    assert json.loads(call.arguments) == {"kind": "x", "a": 1}


def test_many_parts_take_no_time():
    levels = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 8} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": levels}
    assert schemas_of(tools_of(schema)) == {"f": schema}
