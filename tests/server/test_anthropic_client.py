"""The official `anthropic` client against a running server: plain, streaming, tools, thoughts, errors, usage."""

from __future__ import annotations

import json

import pytest
from serving import TOOL_CALLS, saying_llm, serving

from cpmrt.executor import Decode

anthropic = pytest.importorskip("anthropic")

TOOLS = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    }
]
ASK = [{"role": "user", "content": "What does os.path.join do?"}]


@pytest.fixture(scope="module")
def client(demo):
    return anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def says_client(says):
    return anthropic.Anthropic(base_url=says.url, api_key="none", max_retries=0)


def saying(text, **fields):
    return {"model": "says", "max_tokens": 500, "messages": [{"role": "user", "content": f"say({text})yas"}]} | fields


def shown(client, **fields):
    """Return the rendered prompt, which the model repeats as its answer."""
    (block,) = client.messages.create(**{"model": "says", "max_tokens": 500} | fields).content
    return block.text


def test_a_message_with_usage(demo, client):
    asked = {"model": "demo", "max_tokens": 5, "extra_body": {"temperature": 0}}
    message = client.messages.create(messages=[{"role": "user", "content": "What is a set, and what a list?"}], **asked)
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    chat = demo.chat("What is a set, and what a list?", max_tokens=5, temperature=0).json()
    assert message.content[0].text == chat["choices"][0]["message"]["content"]
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    usage = message.usage
    assert usage.output_tokens == 5
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]


def test_a_streamed_message_is_the_whole_one_in_pieces(client):
    fields = {"model": "demo", "messages": ASK, "max_tokens": 20, "extra_body": {"temperature": 0.8, "seed": 7}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, 20)


def test_the_events_of_a_stream_in_their_order(says_client):
    kinds = [event.type for event in says_client.messages.create(**saying("abc"), stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"] and set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", TOOL_CALLS.values(), ids=TOOL_CALLS)
def test_tool_calls(says_client, text, stream):
    fields = saying(text, tools=TOOLS)
    if stream:
        with says_client.messages.stream(**fields) as events:
            message = events.get_final_message()
    else:
        message = says_client.messages.create(**fields)
    said, call = message.content
    assert said.text == "Sure." and message.stop_reason == "tool_use"
    assert call.type == "tool_use" and call.name == "weather" and call.input == {"city": "Köln", "days": 2}


def test_text_and_calls_keep_their_order(says_client):
    fields = saying(TOOL_CALLS["hermes"] + "And:" + TOOL_CALLS["minicpm5"], tools=TOOLS)
    whole = says_client.messages.create(**fields)
    assert [block.type for block in whole.content] == ["text", "tool_use", "text", "tool_use"]
    with says_client.messages.stream(**fields) as events:
        streamed = events.get_final_message()
    assert [block.to_dict() | {"id": ""} for block in streamed.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]


def test_tools_and_their_results_reach_the_template(says_client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "is it?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}]
    prompt = shown(says_client, messages=messages, tools=TOOLS, system=system)
    assert prompt.startswith("[tools][{") and '"description": "Tells the weather."' in prompt
    assert "[system]be brief\n\nbe kind[user]how is it?[assistant]I ask.[" in prompt
    assert '"arguments": {"city": "Bonn"}' in prompt and prompt.endswith("[tool]rain[user]So?[assistant]")


def test_a_last_message_of_the_assistant_is_continued(says_client):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    assert shown(says_client, messages=messages) == "[user]x[assistant]It is"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_blocks_of_their_own(says_client, stream):
    fields = saying("so it is</think>Yes.", thinking={"type": "enabled", "budget_tokens": 1024})
    if stream:
        with says_client.messages.stream(**fields) as events:
            thought, text = events.get_final_message().content
    else:
        thought, text = says_client.messages.create(**fields).content
    assert (thought.type, thought.thinking) == ("thinking", "so it is") and text.text == "Yes."


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_is_named(says_client, stream):
    fields = saying("one two three", stop_sequences=["three", "two", "wo"])
    if stream:
        with says_client.messages.stream(**fields) as events:
            message = events.get_final_message()
    else:
        message = says_client.messages.create(**fields)
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "two", "one ")
    assert says_client.messages.create(**saying("abc", stop_sequences=["x"])).stop_reason == "end_turn"


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(model="demo", messages=ASK, system="be brief").input_tokens
    used = client.messages.create(model="demo", messages=ASK, system="be brief", max_tokens=1).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens > 10


@pytest.mark.parametrize(("fields", "where"), [
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "\ud800"}]}]},
     "messages[0].content[0].content"),
    ({"messages": ASK, "system": "\ud800"}, "system"),
], ids=str)  # fmt: skip
def test_half_a_character_is_named_where_it_stands(says, fields, where):
    body = {"system": "be brief", "max_tokens": 1, **fields}
    answer = says.client.post("/v1/messages", content=json.dumps(body), headers={"Content-Type": "application/json"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith(f"{where}: expected valid Unicode")


@pytest.mark.parametrize(("fields", "error", "kind"), [
    ({"model": "claude"}, "NotFoundError", "not_found_error"),
    ({"max_tokens": 0}, "BadRequestError", "invalid_request_error"),
    ({"extra_body": {"max_tokens": None}}, "BadRequestError", "invalid_request_error"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "BadRequestError", "invalid_request_error"),
    ({"messages": []}, "BadRequestError", "invalid_request_error"),
    ({"messages": [{"role": "system", "content": "x"}]}, "BadRequestError", "invalid_request_error"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "BadRequestError",
     "invalid_request_error"),
    ({"messages": [{"role": "user", "content": 5}]}, "BadRequestError", "invalid_request_error"),
    ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]},
     "BadRequestError", "invalid_request_error"),
    ({"messages": [*ASK, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "It"},
    ]}]}, "BadRequestError", "invalid_request_error"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "BadRequestError", "invalid_request_error"),
    ({"tools": [{"name": "f"}]}, "BadRequestError", "invalid_request_error"),
    ({"tools": TOOLS}, "BadRequestError", "invalid_request_error"),
    ({"thinking": {"type": "perhaps"}}, "BadRequestError", "invalid_request_error"),
    ({"stop_sequences": [""]}, "BadRequestError", "invalid_request_error"),
    ({"extra_body": {"temperature": -1}}, "BadRequestError", "invalid_request_error"),
])  # fmt: skip
def test_errors_have_the_shape_of_that_api(client, fields, error, kind):
    with pytest.raises(getattr(anthropic, error)) as caught:
        client.messages.create(**{"model": "demo", "messages": ASK, "max_tokens": 5} | fields)
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == kind and body["error"]["message"]


def test_keys_are_those_of_x_api_key(tmp_path):
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "ok"), api_keys=("sesame",)) as server:
        right = anthropic.Anthropic(base_url=server.url, api_key="sesame", max_retries=0)
        asked = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        assert right.messages.create(**asked).content[0].text == "ok"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            right.with_options(api_key="wrong").messages.create(**asked)
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_an_error_in_the_middle_of_a_stream_is_raised(tmp_path):
    steps = []

    def fail(step):
        steps.append(step)
        if isinstance(step, Decode) and len(steps) > 50:
            raise RuntimeError("a bug")

    with serving(lambda: saying_llm(tmp_path, lambda prompt: "01" * 500, fail=fail, delay_s=0.001)) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="internal error"):
            for _ in client.messages.create(**saying("x", model="demo"), stream=True):
                pass
