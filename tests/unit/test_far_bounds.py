"""Bounds of integers at the ends of 64 bits, which schema generators write for plain 64-bit integers."""

import json

import pytest

from cpmrt import LLM, SamplingParams
from cpmrt.grammar.far_bounds import grammar_without_far_bounds, schema_without_far_bounds

pytest.importorskip("llguidance")
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
DEEP = {
    "type": "object", "required": ["minimum", "const"], "additionalProperties": False,
    "properties": {
        "minimum": {"anyOf": [INT64, {"$ref": "#/$defs/id"}]}, "const": {"type": ["integer", "null"], "minimum": -1e19},
    },
    "$defs": {"id": {"type": "integer", "exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63}},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_context=256) as llm:
        yield llm


@pytest.mark.parametrize("schema", [INT64, {"type": "integer", "minimum": -(2**63)}, {**INT64, "minimum": 0}, DEEP])
def test_the_ends_of_64_bits_are_no_bounds(llm, schema):
    before = json.dumps(schema)
    answer = llm.generate("x: ", SamplingParams(json_schema=schema, temperature=1.0, seed=1, max_new_tokens=80))
    assert answer.finish_reason == "length" or json.loads(answer.text) is not None
    grammar = "start: %json " + before + ' "!"'
    assert llm.generate("x: ", SamplingParams(grammar=grammar, temperature=1.0, seed=1, max_new_tokens=80)).token_ids
    assert json.dumps(schema) == before, "the caller's own is as it was"


def test_other_bounds_and_values_stay():
    """Near bounds stay, and so do far ends on the other side, those of floats, and values that look like schemas."""
    for schema in (
        {"type": "integer", "minimum": 2**63}, {"type": "integer", "minimum": -(2**60), "maximum": 2**60},
        {"type": "number", "maximum": 2**63}, {"const": INT64}, {"properties": {"a": {"enum": [INT64]}}},
    ):  # fmt: skip
        assert schema_without_far_bounds(json.dumps(schema)) == json.dumps(schema)
    assert json.loads(schema_without_far_bounds(json.dumps({**INT64, "minimum": 5}))) == {
        "type": "integer", "minimum": 5,
    }  # fmt: skip


def test_the_rest_of_a_grammar_stays():
    grammar = 'start: a %json {"type": "integer", "maximum": 9223372036854775807} | "%json {" // %json {\n'
    left = 'start: a %json {"type": "integer"} | "%json {" // %json {\n'
    assert grammar_without_far_bounds(grammar + 'a: "b"') == left + 'a: "b"'
