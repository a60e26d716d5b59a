"""POST /v1/responses with the official client: text, streams, tools, structured answers, and refusals."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from serving import TOOL_CALLS, serving
from tool_model import TOOLS, tool_llm

from cpmrt.generation import Piece
from cpmrt.server.chat_text import ChatText
from cpmrt.server.exchange import usage_of
from cpmrt.server.responses_answer import ResponsesFormat
from cpmrt.sharing.jobs import Ended
from cpmrt.tool_use.formats import HERMES

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
WEATHER = {
    "type": "function", "name": "weather", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}  # fmt: skip


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


@pytest.fixture(scope="module")
def client(says):
    return client_of(says)


def test_a_text(client):
    answer = client.responses.create(model="says", input="say(hello)yas", instructions="be kind")
    assert answer.output_text == "hello" and answer.status == "completed"
    (item,) = answer.output
    assert (item.type, item.role, item.content[0].type) == ("message", "assistant", "output_text")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.instructions == "be kind" and answer.error is None


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_number_beyond_floats_is_no_json(says, length):
    """A number beyond floats is refused as invalid JSON, since the answer would repeat it as Infinity."""
    content = f'{{"input": "say(hi)yas", "metadata": {{"x": [1.5e300, -1e999], "y": "{"z" * length}"}}}}'
    answer = says.client.post("/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert "-1e999" in answer.json()["error"]["message"]


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_only_the_last_item_of_a_cut_answer_is_incomplete(in_one_piece):
    text = "".join(f'<tool_call>\n{{"name": "f", "arguments": {{"n": {n}}}}}\n</tool_call>\n' for n in range(3))[:-18]
    for grows in (True, False):
        chat_text = ChatText(None, {"f": {}}, bound=HERMES, calls_only=True, grows=grows)
        answer = ResponsesFormat("resp_1", "m", {}, chat_text)
        for piece in [text] if in_one_piece else text:
            answer.add((0, Piece(piece, ())))
        answer.add((0, Ended("length")))
        response = json.loads("".join(answer.whole(usage_of(1, 1, 0))))
        assert response["status"] == "incomplete"
        assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]


def test_a_conversation_of_items(client):
    answer = client.responses.create(model="says", input=[
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"role": "user", "content": "three"},
    ])  # fmt: skip
    assert answer.output_text.startswith("[user]one[assistant]two")
    assert '"city": "Bonn"' in answer.output_text and "[tool]rain[user]three" in answer.output_text


def test_a_limit_makes_it_incomplete(client):
    answer = client.responses.create(model="says", input="say(hello)yas", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "he"


def test_a_stream(client):
    events = list(client.responses.create(model="says", input="say(hello)yas", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == "hello" == events[-1].response.output_text
    with client.responses.stream(model="says", input="say(hello)yas") as stream:
        assert stream.get_final_response().output_text == "hello"


@pytest.mark.parametrize("call", TOOL_CALLS.values(), ids=TOOL_CALLS)
def test_calls_that_a_model_makes(client, call):
    fields = {"model": "says", "input": f"say({call})yas", "tools": [WEATHER]}
    answer = client.responses.create(**fields)
    text, found = answer.output
    assert (text.type, found.type, found.name) == ("message", "function_call", "weather")
    assert json.loads(found.arguments) == {"city": "Köln", "days": 2}
    events = list(client.responses.create(**fields, stream=True))
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == found.arguments == events[-1].response.output[1].arguments


def test_thoughts_are_items(client):
    answer = client.responses.create(model="says", input="say(<think>hm</think>yes)yas")
    thought, text = answer.output
    assert (thought.type, thought.content[0].text, text.content[0].text) == ("reasoning", "hm", "yes")


@pytest.mark.parametrize(("said", "count"), [
    ("<think>hm</think>yes", 17), (" <think>größer</think>\n\nyes", 24), ("<think>on and on", 16 + 1),
    ("yes <think>hm</think>", 0), ("<thinner", 0), ("", 0),
])  # fmt: skip
def test_tokens_of_thoughts_are_counted(client, said, count):
    """Tokens of thoughts are counted in the usage: the model says what it is told with a token per byte and one for
    the end."""
    for stream in (False, True):
        answer = client.responses.create(model="says", input=f"say({said})yas", stream=stream)
        usage = (list(answer)[-1].response if stream else answer).usage
        assert usage.output_tokens_details.reasoning_tokens == count <= usage.output_tokens


@pytest.mark.parametrize(("fields", "param"), [
    ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": [5]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"), ({"background": True}, "background"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"), ({"text": {"format": 5}}, "text.format"),
    ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
    ({"input": [{"role": "me", "content": "x"}]}, "input[0].role"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": 5}]}, "tools[0]"), ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"), ({"include": "all"}, "include"),
    ({"input": [{"type": "function_call", "name": 5}]}, "input[0].name"),
    ({"input": [{"type": "function_call"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "input[0].arguments"),
    ({"input": "\ud800"}, "input"), ({"instructions": "\ud800"}, "instructions"),
    ({"instructions": "x", "input": [{"role": "user", "content": "\ud800"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "\ud800"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "\ud800"}]}, "input[0].output"),
], ids=str)  # fmt: skip
def test_what_is_refused(says, fields, param):
    body, headers = json.dumps({"input": "x", **fields}), {"Content-Type": "application/json"}
    answer = says.client.post("/v1/responses", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_what_asks_for_nothing_is_taken(says):
    fields = {"truncation": "disabled", "include": ["reasoning.encrypted_content"]}
    without_tools = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}  # the values that answers state
    for each in (fields, {"truncation": None, "include": None}, {"include": []}, without_tools):
        assert says.client.post("/v1/responses", json={"input": "x", **each}).status_code == 200


class Weather(BaseModel):
    is_raining: bool
    wind: bool


def test_structured_text(demo):
    pytest.importorskip("llguidance")
    client = client_of(demo)
    parsed = client.responses.parse(model="demo", input="?", text_format=Weather, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Weather)
    wanted = {"type": "json_schema", "name": "w", "schema": {"enum": ["rain", "sun"]}}
    answer = client.responses.create(model="demo", input="?", text={"format": wanted}, temperature=1)
    assert json.loads(answer.output_text) in ("rain", "sun")
    with client.responses.stream(model="demo", input="?", text_format=Weather, max_output_tokens=60) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


@pytest.mark.parametrize("fields", [
    {"guided_choice": ["rain", "sun"]}, {"structured_outputs": {"choice": ["rain", "sun"]}}, {"regex": "rain|sun"},
], ids=json.dumps)  # fmt: skip
def test_the_words_of_others_for_a_form(demo, fields):
    pytest.importorskip("llguidance")
    answer = client_of(demo).responses.create(model="demo", input="?", extra_body=fields)
    assert answer.output_text in ("rain", "sun")


def test_a_bias(demo):
    token = demo.engine.llm.tokenizer.encode(" sun", add_special_tokens=False)[0]
    fields = {"logit_bias": {str(token): 100}, "ignore_eos": True}
    answer = client_of(demo).responses.create(model="demo", input="?", max_output_tokens=3, extra_body=fields)
    assert answer.output_text == demo.engine.llm.tokenizer.decode([token] * 3)


def test_a_tool_that_must_be_called(tmp_path):
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    with serving(lambda: tool_llm(tmp_path / "model", "minicpm5")) as server:
        for choice in ("required", {"type": "function", "name": "get_climate"}):
            answer = client_of(server).responses.create(
                model="demo", input="?", tools=tools, tool_choice=choice, parallel_tool_calls=False
            )
            (call,) = answer.output
            assert call.type == "function_call"
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
