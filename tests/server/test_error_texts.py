"""The texts of errors: they repeat what the client sent, and speak of the client's fields and of JSON."""

from __future__ import annotations

import pytest

from cpmrt import RequestError
from cpmrt.server.errors import as_api_error
from cpmrt.text import ChatTemplate

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def refused(server, path, body):
    """Return the error of a request that is refused."""
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(("path", "body", "said"), [
    (CHAT, {"messages": SAID, "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "/usr/bin/ls"}}}, "got '/usr/bin/ls'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "/home/me/cat.png"}]}]},
     "'/home/me/cat.png'"),
    (COMPLETIONS, {"prompt": "x", "guided_grammar": "start: /a/b/c/ (foo"}, "start: /a/b/c/ (foo"),
    (COMPLETIONS, {"prompt": "x", "guided_json": {"$ref": "/schemas/address/x"}}, "/schemas/address/x"),
    (COMPLETIONS, {"prompt": "x", "guided_json": {"type": "object", "patternProperties": {"^k1": {}, "^k": {}}}},
     "/^k1/"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_the_client_sent_stays_as_it_is(demo, path, body, said):
    assert said in refused(demo, path, body)["message"]


def test_the_folder_of_the_model_is_not_told(tmp_path):
    template = ChatTemplate({"default": "{{ messages[0].nothing.more }}"}, tmp_path / "chat_template.jinja", {})
    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": "/a/b/c"}])
    message = as_api_error(caught.value).message
    assert str(tmp_path) not in message and "(chat_template.jinja, line 1 of the template)" in message


@pytest.mark.parametrize(("path", "field"), [("/v1/embeddings", "input"), (COMPLETIONS, "prompt")])
def test_a_wrong_token_of_one_of_several_names_the_field_alone(demo, path, field):
    error = refused(demo, path, {field: [[1], [1000000000]]})
    assert error["message"] == f"{field}[1]: token 0: expected an id in [0, 4096), got 1000000000"
    assert error["param"] == f"{field}[1]"


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/embeddings", {"input": [7] * 600}), ("/v1/embeddings", {"input": "word " * 600}),
    ("/v1/embeddings", {"input": ["x", [7] * 600]}), (COMPLETIONS, {"prompt": [7] * 600}),
    (COMPLETIONS, {"prompt": [7] * 512}), (COMPLETIONS, {"prompt": "x" * 100_000}),
    (COMPLETIONS, {"prompt": ["x", "word " * 600]}), (COMPLETIONS, {"prompt": [7] * 512, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}),
    ("/v1/responses", {"input": "word " * 600}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 600}], "max_tokens": 5}),
])  # fmt: skip
def test_too_long_an_input_speaks_of_what_the_client_can_change(demo, path, body):
    message = refused(demo, path, body)["message"]
    assert message.endswith("; send a shorter input: the server was started with this context"), message
    assert "max_context" not in message and "512" in message


@pytest.mark.parametrize("field", ["guided_json", "json"])
def test_a_schema_of_another_form_names_kinds_of_json(demo, field):
    body = {"prompt": "x"} | ({"structured_outputs": {"json": "{bad"}} if field == "json" else {field: "{bad"})
    message = refused(demo, COMPLETIONS, body)["message"]
    name = "structured_outputs.json" if field == "json" else field
    assert message.startswith(f"{name}: expected a JSON schema: an object, or its JSON text, got text that is no JSON")


@pytest.mark.parametrize(("form", "param"), [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ({"guided_regex": "a"}, "guided_regex"), ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
])  # fmt: skip
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_a_form_beside_a_call_that_must_be_made_is_named(demo, form, param, choice):
    error = refused(demo, CHAT, {"messages": SAID, "tools": TOOLS, "tool_choice": choice, **form})
    assert error["param"] == param
    assert error["message"] == (
        f"{param}: not together with a tool_choice by which a tool must be called; leave one of the two out"
    )


def test_the_other_apis_name_such_a_form_as_they_have_it(demo):
    tool = {"type": "function", "name": "f", "parameters": {}}
    body = {"input": "x", "tools": [tool], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}
    error = refused(demo, "/v1/responses", body)
    assert error["param"] == "text.format" and error["message"].startswith("text.format: not together with a tool")
    body = {"messages": SAID, "max_tokens": 5, "tools": [{"name": "f", "input_schema": {}}], "guided_regex": "a"}
    error = refused(demo, "/v1/messages", body | {"tool_choice": {"type": "any"}})
    assert error["message"].startswith("guided_regex: not together with a tool_choice")


@pytest.mark.parametrize(("choice", "says"), [
    ({"type": "allowed_tools"}, "tool_choice.allowed_tools: expected an object with mode and tools, got null"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [None]}}, "by its name, got null"),
    ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, "mode: expected auto or required, got null"),
    (True, "or allowed_tools, got true"), ({"None": None}, "got {'None': null}"), ("None", "got 'None'"),
    ({"type": "a 'None'", "x": [True, False]}, """got {'type': "a 'None'", 'x': [true, false]}"""),
], ids=str)  # fmt: skip
def test_values_are_those_of_json(demo, choice, says):
    message = refused(demo, CHAT, {"messages": SAID, "tools": TOOLS, "tool_choice": choice})["message"]
    assert message.endswith(says)


def test_a_message_without_content_may_not_be_null(demo):
    message = refused(demo, CHAT, {"messages": [{"role": "user", "content": None}]})["message"]
    assert message == "messages[0].content: expected a string (or null beside tool_calls), got null"


def test_a_name_of_the_client_s_that_looks_like_one_of_python_stays(demo):
    choice = {"type": "function", "function": {"name": "SamplingParams.top_p"}}
    error = refused(demo, CHAT, {"messages": SAID, "tools": TOOLS, "tool_choice": choice})
    assert error["message"].endswith("got 'SamplingParams.top_p'")
