"""Fields of requests: those used, those accepted without effect, and those refused by name."""

from __future__ import annotations

import json

import pytest

from cpmrt import SamplingParams
from cpmrt.server.schema import read_completion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def ask(server, fields, path=CHAT, text="say(ok)yas"):
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return server.client.post(path, json=prompt | fields)


ACCEPTED = [
    {"user": "me"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "flex"}, {"verbosity": "low"},
    {"safety_identifier": "x"}, {"prompt_cache_key": "x"}, {"prediction": {"type": "content", "content": "x"}},
    {"min_tokens": 0}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"skip_special_tokens": True},
    {"length_penalty": 1.0}, {"repeat_penalty": 1}, {"n_predict": -1}, {"do_sample": True}, {"num_beams": 1},
    {"top_a": 0}, {"penalty_alpha": 0.0}, {"eta_cutoff": 0}, {"stop_regex": None}, {"suffix": None}, {"suffix": ""},
    {"tools": []}, {"whatever": [1]},
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_that_change_nothing_are_accepted(says, fields, path):
    answer = ask(says, fields, path)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "ok"


REFUSED = [
    {"guided_whitespace_pattern": " "}, {"min_tokens": 5},
    {"use_beam_search": True}, {"length_penalty": 0.5}, {"bad_words": ["x"]}, {"allowed_token_ids": [1]},
    {"include_stop_str_in_output": True}, {"skip_special_tokens": False},
    {"min_tokens": True}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 5},
    {"repeat_penalty": 1.3}, {"n_predict": 5}, {"num_predict": 5}, {"max_new_tokens": 5}, {"max_length": 5},
    {"max_output_tokens": 5}, {"do_sample": False}, {"num_beams": 4}, {"num_beam_groups": 2},
    {"diversity_penalty": 0.5}, {"penalty_alpha": 0.6}, {"top_a": 0.2}, {"eta_cutoff": 1e-3}, {"epsilon_cutoff": 1e-3},
    {"top_n_sigma": 1}, {"smoothing_factor": 0.3}, {"dynatemp_range": 0.5}, {"stop_regex": "a+"},
    {"stop_sequences": ["x"]}, {"no_stop_trim": True},
]  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED, ids=json.dumps)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_that_would_change_the_answer_are_refused_by_name(says, fields, path):
    answer = ask(says, fields, path)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] in fields
    assert error["message"].startswith(f"{error['param']} is not supported: ") and len(error["message"]) > 40


@pytest.mark.parametrize("fields", [
    {"continue_final_message": True}, {"add_generation_prompt": False}, {"chat_template": "x"}, {"functions": [{}]},
    {"function_call": "auto"}, {"modalities": ["text", "audio"]}, {"web_search_options": {}}, {"documents": [{}]},
    {"suffix": "x"}, {"system": "Be brief."}, {"instructions": "Be brief."}, {"enable_thinking": False},
    {"thinking": {"type": "disabled"}}, {"reasoning": {"effort": "none"}}, {"add_special_tokens": True},
], ids=json.dumps)  # fmt: skip
def test_what_only_chats_refuse(says, fields):
    answer = ask(says, fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] in fields


@pytest.mark.parametrize("fields", [
    {"max_completion_tokens": 5}, {"top_logprobs": 2}, {"add_special_tokens": False}, {"tools": TOOLS},
], ids=json.dumps)  # fmt: skip
def test_what_only_completions_refuse(says, fields):
    answer = ask(says, fields, COMPLETIONS)
    assert answer.status_code == 400 and answer.json()["error"]["param"] in fields


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(("path", "field"), [
    (CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETIONS, "max_tokens"),
    ("/v1/responses", "max_output_tokens"), (CHAT, "n"), (COMPLETIONS, "n"), (COMPLETIONS, "best_of"),
])  # fmt: skip
def test_fewer_than_one_token_or_answer_is_an_error_of_the_field(says, path, field, value):
    body = {"input": "x"} if path == "/v1/responses" else {}
    answer = says.client.post(path, json=body | {field: value}) if body else ask(says, {field: value}, path)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field
    assert error["message"].startswith(f"{field}: expected ") and error["message"].endswith(f", got {value}")


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/responses", {"input": "x"}), ("/infill", {"input_prefix": "x"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
])  # fmt: skip
def test_all_other_endpoints_refuse_them_too(says, path, body):
    error = says.client.post(path, json=body | {"min_tokens": 5}).json()["error"]
    assert error["message"].startswith("min_tokens is not supported: ")


@pytest.mark.parametrize(("path", "body", "field", "value", "instead"), [
    ("/v1/responses", {"input": "x"}, "max_tokens", 5, "max_output_tokens"),
    ("/v1/responses", {"input": "x"}, "max_new_tokens", 5, "max_output_tokens"),
    ("/v1/responses", {"input": "x"}, "response_format", {"type": "json_object"}, "text"),
    ("/v1/responses", {"input": "x"}, "reasoning_effort", "none", "reasoning"),
    ("/v1/responses", {"input": "x"}, "n", 2, "/v1/chat/completions"),
    ("/v1/responses", {"input": "x"}, "logprobs", True, "/v1/chat/completions"),
    ("/v1/responses", {"input": "x"}, "stop_sequences", ["x"], "stop"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}, "stop", "x", "stop_sequences"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}, "instructions", "x", "system"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}, "reasoning_effort", "low",
     "thinking"),
    ("/infill", {"input_prefix": "x"}, "stop_sequences", ["x"], "stop"),
    ("/infill", {"input_prefix": "x"}, "max_completion_tokens", 5, "max_tokens"),
], ids=json.dumps)  # fmt: skip
def test_other_endpoints_refuse_what_they_have_by_another_name(says, path, body, field, value, instead):
    answer = says.client.post(path, json={**body, field: value})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith(f"{field} is not supported: use {instead}"), message


def test_responses_take_the_forms_of_chats(says):
    """/v1/responses reads a form as chats do, shown by this executor's error that it takes no schemas."""
    answer = says.client.post("/v1/responses", json={"input": "x", "guided_regex": "[a-c]{2}"})
    assert answer.status_code == 400 and "takes no schemas" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("fields", [
    {"max_tokens": 5}, {"max_completion_tokens": 5}, {"n": 2}, {"stop_sequences": ["x"]}, {"logprobs": True},
    {"response_format": {"type": "json_object"}}, {"reasoning_effort": "none"}, {"enable_thinking": False},
    {"thinking": {"type": "disabled"}}, {"messages": [{"role": "user", "content": "x"}]}, {"system": "Be brief."},
    {"functions": [{}]}, {"function_call": "auto"},
], ids=json.dumps)  # fmt: skip
def test_what_only_responses_refuse(says, fields):
    answer = says.client.post("/v1/responses", json={"input": "say(ok)yas"} | fields)
    (name,) = fields
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert answer.json()["error"]["message"].startswith(f"{name} is not supported: ")


@pytest.mark.parametrize("fields", [
    {"stop": ["x"]}, {"max_completion_tokens": 5}, {"max_output_tokens": 5}, {"logprobs": True}, {"top_logprobs": 2},
    {"reasoning_effort": "none"}, {"enable_thinking": False}, {"reasoning": {"effort": "none"}},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"instructions": "Be brief."},
    {"parallel_tool_calls": False}, {"allow_special_tokens": True}, {"functions": [{}]}, {"function_call": "auto"},
    {"output_format": {}}, {"mcp_servers": [{}]}, {"container": "x"}, {"context_management": {}},
], ids=json.dumps)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_only_messages_refuse(says, path, fields):
    body = {"messages": [{"role": "user", "content": "say(ok)yas"}], "max_tokens": 9}
    error = says.client.post(path, json=body | fields).json()["error"]
    (name,) = fields
    assert error["message"].startswith(f"{name} is not supported: ")


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/responses", {
        "input": "x", "n": 1, "logprobs": False, "top_logprobs": 0, "system": "", "functions": [], "stop": None,
    }),
    ("/v1/messages", {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "logprobs": False, "top_logprobs": 0,
        "parallel_tool_calls": True, "allow_special_tokens": False, "stop": [], "instructions": "",
        "mcp_servers": [],
    }),
])  # fmt: skip
def test_fields_of_other_endpoints_that_ask_for_nothing_are_accepted(says, path, body):
    assert says.client.post(path, json=body).status_code == 200


@pytest.mark.parametrize(("fields", "text"), [
    ({}, "hello"), ({"stop": "l"}, "he"), ({"stop": ["o", "x"]}, "hell"), ({"stop": None}, "hello"),
], ids=json.dumps)  # fmt: skip
def test_responses_end_where_chats_do(says, fields, text):
    chat = ask(says, fields, text="say(hello)yas").json()["choices"][0]["message"]["content"]
    response = says.client.post("/v1/responses", json={"input": "say(hello)yas"} | fields).json()
    assert response["output"][0]["content"][0]["text"] == chat == text


@pytest.mark.parametrize(("fields", "param"), [
    ({"n_predict": "x"}, "n_predict"), ({"repeat_penalty": 0}, "repeat_penalty"), ({"max_tokens": "x"}, "max_tokens"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
], ids=json.dumps)  # fmt: skip
def test_infill_names_fields_as_the_client_did(says, fields, param):
    error = says.client.post("/infill", json={"input_prefix": "x"} | fields).json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: expected ")


@pytest.mark.parametrize("fields", [
    {"n_predict": 5, "max_tokens": 6}, {"max_tokens": 6, "n_predict": 5},
    {"repetition_penalty": 1.1, "repeat_penalty": 1},
], ids=json.dumps)  # fmt: skip
def test_infill_drops_neither_of_two_names_that_contradict(says, fields):
    error = says.client.post("/infill", json={"input_prefix": "x"} | fields).json()["error"]
    assert error["param"] in ("n_predict", "repeat_penalty") and "contradicts" in error["message"]


@pytest.mark.parametrize("others", [{"max_tokens": None}, {"max_tokens": "x"}], ids=json.dumps)
def test_a_field_of_infill_that_is_null_hides_no_other(says, others):
    """A wrong value of a field is reported even if the field's other name is null."""
    fields = {"n_predict": "x"} | others
    error = says.client.post("/infill", json={"input_prefix": "x"} | fields).json()["error"]
    assert error["param"] == "n_predict" and error["message"].startswith("n_predict: expected ")


@pytest.mark.parametrize(("fields", "instead"), [
    ({"repeat_penalty": 1.3}, "repetition_penalty"), ({"n_predict": 5}, "max_tokens"),
    ({"max_new_tokens": 5}, "max_tokens"), ({"do_sample": False}, "temperature"), ({"stop_regex": "a"}, "use stop"),
], ids=json.dumps)  # fmt: skip
def test_the_field_to_use_instead_is_named(says, fields, instead):
    assert instead in ask(says, fields).json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"user": 5}, {"metadata": "x"}, {"store": "yes"}, {"parallel_tool_calls": 1},
                                    {"reasoning_effort": "hard"}, {"reasoning_effort": 1}], ids=json.dumps)  # fmt: skip
def test_accepted_fields_have_types_too(says, fields):
    answer = ask(says, fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] in fields


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS * 513}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f"}] * 513}),
    ("/v1/messages", {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
        "tools": [{"name": "f", "input_schema": {}}] * 513,
    }),
], ids=[CHAT, "responses", "messages"])  # fmt: skip
def test_tools_are_bounded_in_number(says, path, body):
    error = says.client.post(path, json=body).json()["error"]
    assert error["message"] == "tools: expected at most 512 tools, got 513"


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 7, 2**64 - 1, -1, -(2**63)])
def test_a_seed_is_that_of_the_same_seed_in_python(demo, seed):
    wanted = read_completion({"prompt": [5], "seed": seed}, ["demo"]).wanted
    assert wanted.seed(0) == demo.engine.llm.request([5], SamplingParams(seed=seed)).seed


@pytest.mark.parametrize(("effort", "thinks"), [
    ("none", False), ("minimal", False), ("low", True), ("high", True), ("xhigh", True), ("max", True),
])  # fmt: skip
def test_reasoning_effort_switches_thoughts(says, effort, thinks):
    message = ask(says, {"reasoning_effort": effort}, text="say(so</think>yes)yas").json()["choices"][0]["message"]
    assert message.get("reasoning_content") == ("so" if thinks else None)
    body = {"input": "say(so</think>yes)yas", "reasoning": {"effort": effort}}
    kinds = [item["type"] for item in says.client.post("/v1/responses", json=body).json()["output"]]
    assert kinds == (["reasoning", "message"] if thinks else ["message"])


def test_the_template_s_own_switch_wins_over_reasoning_effort(says):
    fields = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert ask(says, fields, text="say(so</think>yes)yas").json()["choices"][0]["message"]["content"] == "so</think>yes"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "count"), [(None, 3), (True, 3), (False, 1)])
def test_parallel_tool_calls_false_gives_the_first_call_alone(says, parallel, count, stream):
    fields = {"tools": TOOLS, "parallel_tool_calls": parallel, "stream": stream}
    answer = ask(says, fields, text=f"say({CALL * 3})yas")
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    else:
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert len(calls) == count


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("max_tokens", [4000, 1_000_000, 2**40])
def test_max_tokens_above_the_room_ends_with_length(says, path, max_tokens):
    answer = ask(says, {"max_tokens": max_tokens}, path, text=f"say({'x' * 3000})yas").json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 4096


@pytest.mark.parametrize("max_tokens", [None, 5, 10**6])
def test_a_prompt_that_leaves_no_room_is_refused_with_its_length(demo, max_tokens):
    answer = ask(demo, {"prompt": [7] * 512, "max_tokens": max_tokens}, COMPLETIONS)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] is None
    assert "512" in error["message"] and "send a shorter input" in error["message"]


@pytest.mark.parametrize(("wrong", "says"), [
    ("word " * 600, "the prompt does not fit the context"), ([7] * 513, "the prompt does not fit the context"),
    ([], "the prompt is empty"), ([-1], "token 0: expected an id in"),
])  # fmt: skip
def test_a_wrong_prompt_of_many_is_named(demo, wrong, says):
    error = ask(demo, {"prompt": ["a", wrong], "max_tokens": 1}, COMPLETIONS).json()["error"]
    assert error["param"] == "prompt[1]" and error["message"].startswith(f"prompt[1]: {says}")


@pytest.mark.parametrize(("fields", "message"), [
    ({"seed": 2**70}, "seed: expected an integer of at most 64 bits, got 1180591620717411303424"),
    ({"seed": 10**200}, "seed: expected an integer of at most 64 bits, got a number of 665 bits"),
    ({"seed": "x"}, "seed: expected an integer, got 'x'"),
    ({"seed": True}, "seed: expected an integer, got true"),
    ({"seed": [1]}, "seed: expected an integer, got an array"),
    ({"temperature": "hot"}, "temperature: expected a number, got 'hot'"),
    ({"stream": 1}, "stream: expected true or false, got 1"),
    ({"n": 100}, "n: that makes 100 answers, and this server takes 68 at a time"),
])  # fmt: skip
def test_messages_say_what_came(says, fields, message):
    assert ask(says, fields).json()["error"]["message"] == message


def test_too_many_prompts_do_not_blame_n(says):
    error = ask(says, {"prompt": ["x"] * 100}, COMPLETIONS).json()["error"]
    assert error["param"] == "prompt" and error["message"].startswith("prompt: that makes 100 answers")


@pytest.mark.parametrize(("stop", "is_allowed"), [
    (["x" * 16384], True),
    (["é" * 8192], True),
    ([f"{number:016}" for number in range(1024)], True),
    (["x" * 16384, "y"], False),
    (["é" * 8193], False),
    ([f"{number}" for number in range(1025)], False),
    (["x" * 60_000] * 16, False),
], ids=["one", "umlauts", "many", "two", "too many umlauts", "too many", "very long"])  # fmt: skip
def test_stop_strings_are_bounded_in_number_and_bytes(says, stop, is_allowed):
    answer = ask(says, {"stop": stop})
    assert answer.status_code == (200 if is_allowed else 400), answer.text
    if not is_allowed:
        assert answer.json()["error"]["param"] == "stop" and "at most" in answer.json()["error"]["message"]
