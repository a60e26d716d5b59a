"""Errors that name tools whose schemas no grammar can express, and models whose template shows no tools."""

from __future__ import annotations

import json

import pytest
from serving import TOOL_CALLS, serving
from tool_model import TOOLS, tool_llm

from cpmrt import RequestError, SamplingParams
from cpmrt.tool_use.calls import schemas_of
from cpmrt.tool_use.finder import calls_in

pytest.importorskip("llguidance")
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
FAMILIES = ["hermes", "minicpm5", pytest.param("minicpm4", marks=pytest.mark.all)]


@pytest.fixture(scope="module", params=FAMILIES)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with serving(lambda: tool_llm(folder / "model", request.param)) as server:
        yield server


GOOD = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
BAD = [
    ({"type": "bogus"}, "bogus"), ({"type": "string"}, "string"), ({"properties": 5}, "properties"),
    ({"properties": {"a": {"type": "bogus"}}}, "Invalid type: bogus"), ({"properties": {"a": 5}}, "properties.a"),
    ({"properties": {"a": {"type": "string", "pattern": "("}}}, "unclosed group"),
    ({"properties": {"a": {"type": "string", "pattern": 5}}}, "pattern"),
    ({"properties": {"a": {"type": "string", "pattern": "(", "maxLength": 5}}}, "unclosed group"),
    ({"properties": {"a": {"type": "string", "minLength": 2.5}}}, "minLength"),
    ({"properties": {"a": {"enum": 5}}}, "enum"), ({"properties": {"a": {"type": [["x"]]}}}, "type must be a string"),
    ({"properties": {"a": {}}, "required": 5}, "required"), ({"properties": {"a" * 300: 5}}, "properties.aaa"),
    ({"properties": {"a": {"enum": ["\u2028"]}, "b": {"type": "bogus"}}}, "Invalid type"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
]  # fmt: skip


def functions(*schemas):
    named = zip("fgh", schemas, strict=False)
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in named]


@pytest.mark.parametrize(("schema", "reason"), BAD, ids=str)
def test_a_schema_that_no_grammar_can_have_is_named(server, schema, reason):
    """A tool's schema that no grammar can express is named, over HTTP and in Python, without mentioning a grammar."""
    tools = functions(GOOD, schema, GOOD)
    error = server.chat(tools=tools, tool_choice="required").json()["error"]
    assert (error["param"], error["code"]) == ("tools[1].function.parameters", "invalid_value")
    assert reason in error["message"] and "'g'" in error["message"] and len(error["message"]) < 250, error
    assert "rammar" not in error["message"] and " | " not in error["message"]
    with pytest.raises(RequestError) as caught:
        server.engine.llm.chat([{"role": "user", "content": "?"}], tools=tools, tool_choice="g")
    assert str(caught.value) == error["message"]


@pytest.mark.parametrize(("schema", "reason"), BAD, ids=str)
def test_a_model_that_may_call_is_free_with_such_a_schema(server, schema, reason):
    """With such a schema a model that may call answers freely, and its calls are read."""
    answer = server.chat(tools=functions(schema), max_tokens=2)
    assert answer.status_code == 200, answer.text
    for call in TOOL_CALLS.values():
        calls_in(call.replace("weather", "f"), schemas_of(functions(schema)))


def test_a_bad_schema_of_an_answer_that_may_call_is_named(server):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "bogus"}}}}
    error = server.chat(tools=TOOLS, **fields).json()["error"]
    assert error["param"] == "response_format.json_schema.schema" and "Invalid type: bogus" in error["message"]
    fields = {"guided_json": SCHEMAS["get_weather"], "tools": functions(GOOD, {"type": "bogus"})}
    assert server.chat(**fields).json()["error"]["param"] == "tools[1].function.parameters"


def test_tools_that_are_too_much_together_are_named(server):
    long = [{"type": "object", "properties": {"a": {"enum": [c * 90_000]}}} for c in "abc"]
    error = server.chat(tools=functions(*long), tool_choice="required").json()["error"]
    assert error["param"] == "tools" and "SamplingParams" not in error["message"] and "at most" in error["message"]


def test_the_other_apis_name_the_schema_as_they_have_it(server):
    bad = {"type": "bogus"}
    tools = [{"type": "function", "name": "f", "parameters": bad}]
    answer = server.client.post("/v1/responses", json={"input": "?", "tools": tools, "tool_choice": "required"})
    assert answer.json()["error"]["param"] == "tools[0].parameters"
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5, "tool_choice": {"type": "any"}}
    answer = server.client.post("/v1/messages", json=body | {"tools": [{"name": "f", "input_schema": bad}]})
    assert answer.json()["error"]["message"].startswith("tools[0].input_schema: type in the schema of 'f': ")


def test_a_tool_whose_fields_are_null_is_one_without_them(server):
    """A tool with null fields is one without them; OpenAI's client sends null for parameters of a function without
    any."""
    bare = {"name": "f"}
    null = {**bare, "parameters": None, "description": None, "strict": None}
    for choice in ("required", "auto"):
        bodies = [{"tools": [{"type": "function", "function": tool}], "tool_choice": choice, "max_tokens": 40}
                  for tool in (bare, null)]  # fmt: skip
        answers = [server.chat(**body).json()["choices"][0]["message"] for body in bodies]
        for call in (call for answer in answers for call in answer.get("tool_calls", ())):
            assert call.pop("id") and json.loads(call["function"]["arguments"]) == {}
        assert answers[0] == answers[1]
    body = {"input": "?", "tools": [{"type": "function", **null}], "tool_choice": "required", "max_output_tokens": 40}
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 200 and answer.json()["output"][0]["arguments"] == "{}", answer.text


def test_a_template_without_tools(demo):
    """A template that shows no tools refuses tools of free choice, but a forced call works, as a grammar brings it
    about."""
    llm, messages = demo.engine.llm, [{"role": "user", "content": "Weather?"}]
    tools, params = functions(GOOD), SamplingParams(max_new_tokens=60)
    with pytest.raises(RequestError, match="^tools: the chat template of this model has none; pass tool_choice="):
        llm.chat(messages, params, tools=tools)
    with pytest.raises(RequestError, match="has none"):
        llm.chat([messages, messages], params, tools=tools, tool_choice="auto")
    assert llm.chat(messages, SamplingParams(max_new_tokens=2), tools=tools, tool_choice="none").text
    assert llm.chat(messages, SamplingParams(max_new_tokens=2), tools=[]).text
    error = demo.chat("Weather?", tools=tools).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter") and "tool_choice" in error["message"]
    for choice in ("required", "f"):
        (call, *_) = llm.chat(messages, params, tools=tools, tool_choice=choice).tool_calls
        assert json.loads(call.arguments) == {"city": "Bonn"}
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 60}
        (call,) = demo.chat("Weather?", **fields).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Bonn"}
    body = {"messages": messages, "max_tokens": 60, "tool_choice": {"type": "tool", "name": "f"}}
    body["tools"] = [{"name": "f", "input_schema": GOOD}]
    (block,) = demo.client.post("/v1/messages", json=body).json()["content"]
    assert block["input"] == {"city": "Bonn"}
