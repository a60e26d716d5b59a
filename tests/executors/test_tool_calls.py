"""Tool calls under the grammars of three families of models are read by their parsers and validate."""

import json

import jsonschema
import pytest
from form_cases import schemas

from cpmrt import LLM, RequestError, SamplingParams
from cpmrt.grammar import Thought
from cpmrt.tool_use.finder import calls_in
from cpmrt.tool_use.formats import FORMATS, HERMES, PYTHON
from cpmrt.tool_use.grammars import grammar_of

pytest.importorskip("llguidance")
PROMPT = "Which tool? "


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_sequences=8, max_context=768) as llm:
        yield llm


def tool_sets(count, seed=0):
    """Return sets of one to three tools whose parameters are schemas of every kind."""
    made = [plain_names(schema) for schema in schemas(3 * count, seed)]
    names = [[f"tool_{number}.of_{place}" for place in range(number % 3 + 1)] for number in range(count)]
    return [dict(zip(each, made[3 * number :], strict=False)) for number, each in enumerate(names)]


def plain_names(schema):
    """Return the schema with property names that every format can write."""
    names = {name: f"p{number}" for number, name in enumerate(schema["properties"])}
    properties = {names[name]: value for name, value in schema["properties"].items()}
    return schema | {"properties": properties, "required": [names[name] for name in schema["required"]]}


def check(llm, form, sets):
    grammars = [grammar_of(form, tools, llm.tokenizer, one_call=number % 2 == 0) for number, tools in enumerate(sets)]
    params = [
        SamplingParams(grammar=grammar, temperature=1.0, seed=seed, max_new_tokens=300)
        for seed, grammar in enumerate(grammars)
    ]
    ended = 0
    for number, (tools, answer) in enumerate(zip(sets, llm.generate([PROMPT] * len(sets), params), strict=True)):
        if answer.finish_reason != "stop":
            continue
        ended += 1
        calls = calls_in(answer.text, tools)
        assert len(calls) == 1 if number % 2 == 0 else calls, answer.text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), tools[call.name], jsonschema.Draft202012Validator)
    assert ended >= len(sets) / 2


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_calls_have_the_format_and_validate(llm, form):
    check(llm, form, tool_sets(2))


@pytest.mark.all
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_40_tool_sets(llm, form):
    check(llm, form, tool_sets(40, seed=1))


def test_a_name_that_no_grammar_can_have_is_refused(llm):
    with pytest.raises(RequestError, match="tools: the name"):
        grammar_of(HERMES, {'a"b': {}}, llm.tokenizer, one_call=True)
    with pytest.raises(RequestError, match="as Python has them"):
        grammar_of(PYTHON, {"f": {"properties": {"class": {}}}}, llm.tokenizer, one_call=True)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
def test_a_text_of_any_characters_comes_back(llm, form):
    value = "a\x7f\x00\x1b \b\t\r\n\u2028\\u0041é漢🙂'\"b"
    tools = {"f": {"type": "object", "properties": {"x": {"enum": [value]}}, "required": ["x"]}}
    params = SamplingParams(grammar=grammar_of(form, tools, llm.tokenizer, one_call=True), max_new_tokens=200)
    ((_, arguments),) = calls_in(llm.generate(PROMPT, params).text, tools)
    assert json.loads(arguments) == {"x": value}


def test_arguments_are_an_object_even_where_a_schema_allows_more(llm):
    """Arguments are an object even if the schema allows null; so here the whole call is certain."""
    schema = {"type": ["null", "object"], "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    params = SamplingParams(grammar=grammar_of(HERMES, {"f": schema}, llm.tokenizer, one_call=True))
    forced = llm.maker.forms.grammars.matcher(params.form, Thought())().forced()
    assert b'"arguments": {"a": 1}' in b"".join(map(llm.tokenizer.written_bytes, forced))
