"""The texts of errors: they repeat what the client sent, and speak of the client's fields and of JSON."""

from __future__ import annotations

import pytest

from cpmrt.errors import (
    BusyError,
    ClosedError,
    DeviceError,
    FormError,
    MaskError,
    NoDeviceError,
    RequestError,
)
from cpmrt.server.errors import as_api_error, invalid, overloaded, unavailable
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


@pytest.mark.parametrize(("error", "status", "kind", "code", "retry_after"), [
    (overloaded(3), 429, "rate_limit_error", "queue_full", "1"),
    (BusyError("x"), 429, "rate_limit_error", "forms_busy", "5"),
    (unavailable("x"), 503, "service_unavailable_error", "unavailable", "5"),
    (ClosedError("x"), 503, "service_unavailable_error", "unavailable", "5"),
    (DeviceError("x"), 503, "service_unavailable_error", "device_failed", None),
    (NoDeviceError("x"), 503, "service_unavailable_error", "device_failed", None),
    (RequestError("x"), 400, "invalid_request_error", "invalid_value", None),
    (FormError("x"), 400, "invalid_request_error", "form_failed", None),
    (MaskError.late(), 500, "server_error", "mask_failed", None),
    (ZeroDivisionError("x"), 500, "server_error", "internal_error", None),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")  # fmt: skip
def test_programs_can_tell_whose_fault_it_is_and_when_to_come_again(error, status, kind, code, retry_after):
    found = as_api_error(error)
    told = found.body()["error"]
    assert (found.status, told["type"], told["code"]) == (status, kind, code)
    assert found.headers.get("Retry-After") == retry_after


def test_a_field_that_only_begins_as_another_keeps_its_name():
    names = {"stop": "stop_sequences", r"messages\[(\d+)\]": r"input[\1]"}
    given = ("stop", "stop[0]", "stop_token_ids", "messages[3].role", "n")
    renamed = [invalid(param, "wrong").renamed(names) for param in given]
    expected = ["stop_sequences", "stop_sequences[0]", "stop_token_ids", "input[3].role", "n"]
    assert [error.param for error in renamed] == expected
    assert [error.message for error in renamed] == [f"{name}: wrong" for name in expected]


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


EITHER = "expected a string, an array of token ids, or an array of either"
CHOSEN = {"messages": SAID, "tools": TOOLS, "tool_choice": "required"}


@pytest.mark.parametrize(("path", "body", "param", "problem"), [
    (COMPLETIONS, {"prompt": []}, "prompt", f"{EITHER}, got an empty array"),
    (COMPLETIONS, {}, "prompt", f"{EITHER}, got null"),
    (COMPLETIONS, {"prompt": [1, 2, "x"]}, "prompt[2]", "expected a token id, got 'x'"),
    (COMPLETIONS, {"prompt": ["x", 5]}, "prompt[1]", "expected a string or an array of token ids, got 5"),
    (COMPLETIONS, {"prompt": [[1], [2, 1.5]]}, "prompt[1][1]", "expected a token id, got 1.5"),
    ("/v1/embeddings", {"input": {"x": 1}}, "input", f"{EITHER}, got an object"),
    (COMPLETIONS, {"prompt": "x", "stop": 3}, "stop", "expected a non-empty string or an array of them, got 3"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop", "expected a non-empty string, got ''"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a", None]}, "stop[1]", "expected a non-empty string, got null"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [5, -1]}, "stop_token_ids[1]", "expected a token id, got -1"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "expected token ids as keys, got 'a'"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias",
     "expected numbers in [-100, 100] as values, got 101 for token 5"),
    (COMPLETIONS, {"prompt": "x", "guided_choice": ["a", 1]}, "guided_choice",
     "expected an array of strings, none empty, got 1"),
    (CHAT, {"messages": []}, "messages", "expected an array of at least one message, got an empty array"),
    (CHAT, {}, "messages", "expected an array of at least one message, got null"),
    (CHAT, CHOSEN | {"tools": [{}]}, "tools[0]",
     'expected {"type": "function", "function": {"name": ...}}, got an empty object'),
    (CHAT, {"messages": SAID, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "expected a JSON schema (an object), got null"),
    ("/v1/responses", {"input": []}, "input", "expected a text or an array of items, got an empty array"),
    ("/v1/responses", {"input": [{"type": "reasoning", "summary": []}]}, "input",
     "expected a message, a call or its output, got reasoning only"),
    ("/detokenize", {"tokens": "x"}, "tokens", "expected an array of token ids, got 'x'"),
    ("/detokenize", {"tokens": [1, None]}, "tokens[1]", "expected a token id, got null"),
])  # fmt: skip
def test_a_wrong_value_is_told_with_its_place(demo, path, body, param, problem):
    error = refused(demo, path, body)
    assert (error["param"], error["message"]) == (param, f"{param}: {problem}")


@pytest.mark.parametrize(("body", "param"), [
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: expected an object, got null"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "x"}]}]},
     "messages[0].content[0].input: expected an object, got 'x'"),
    ({"max_tokens": None}, "max_tokens: expected a number of tokens, got null"),
])  # fmt: skip
def test_so_is_one_of_the_messages_api(demo, body, param):
    assert refused(demo, "/v1/messages", {"messages": SAID, "max_tokens": 5} | body)["message"] == param


def test_two_biases_of_one_token_are_refused(demo):
    error = refused(demo, COMPLETIONS, {"prompt": "x", "logit_bias": {"5": -100, "05": 3}})
    assert error["message"] == "logit_bias: expected one bias for each token, got two for token 5"


@pytest.mark.parametrize("body", [
    {"prompt": "a", "content": "b"}, {"messages": SAID, "prompt": "a"}, {"messages": SAID, "content": "b"},
])  # fmt: skip
def test_only_one_text_is_tokenized_at_a_time(demo, body):
    first, second = body
    error = refused(demo, "/tokenize", body)
    assert error["message"] == f"{second}: contradicts {first}; give one of them" and error["param"] == second
