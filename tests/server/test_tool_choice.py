"""Answers that must call a tool, in the formats of three families of models, and the clients that ask for them."""

from __future__ import annotations

import json
import re

import anthropic
import jsonschema
import openai
import pytest
from serving import serving
from tool_model import MARKERS, TOOLS, tool_llm

from cpmrt import RequestError, SamplingParams
from cpmrt.grammar import Thought
from cpmrt.server.schema import read_chat

pytest.importorskip("llguidance")
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
SAMPLED = {"temperature": 1, "seed": 4, "max_tokens": 400}


FAMILIES = [pytest.param(name, marks=() if name == "minicpm5" else pytest.mark.all) for name in MARKERS]


@pytest.fixture(scope="module", params=FAMILIES)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with serving(lambda: tool_llm(folder / "model", request.param)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def check(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def asked(client, **fields):
    messages = [{"role": "user", "content": "Weather?"}]
    return client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, **SAMPLED | fields)


def test_a_tool_must_be_called(client):
    for seed in range(2):
        (choice,) = asked(client, tool_choice="required", seed=seed, parallel_tool_calls=False).choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert len(choice.message.tool_calls) == 1
        check(choice.message.tool_calls)


def test_a_tool_is_called_by_its_name(client):
    named = {"type": "function", "function": {"name": "get_climate"}}
    (choice,) = asked(client, tool_choice=named).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["get_climate"]
    check(choice.message.tool_calls)


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_one_of_the_allowed_tools_must_be_called(client, name):
    shown = asked(client, tool_choice="auto", max_tokens=1).usage.prompt_tokens
    for stream in (False, True):
        fields = {"tool_choice": allowed("required", name), "parallel_tool_calls": False}
        if stream:
            _, calls, reason = streamed(client, **fields)
            assert [called for called, _ in calls] == [name] and reason == "tool_calls"
        else:
            answer = asked(client, **fields)
            assert [call.function.name for call in answer.choices[0].message.tool_calls] == [name]
            check(answer.choices[0].message.tool_calls)
            assert answer.usage.prompt_tokens == shown


def test_all_tools_may_be_allowed(client):
    fields = {"parallel_tool_calls": False, "tool_choice": allowed("required", *SCHEMAS)}
    both = [asked(client, **fields | choice) for choice in ({}, {"tool_choice": "required"})]
    assert len({json.dumps(each.choices[0].message.tool_calls[0].function.to_dict()) for each in both}) == 1


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_call_at_will_is_of_an_allowed_tool(server, name):
    chat = read_chat({"messages": [{"role": "user", "content": "?"}], "tools": TOOLS,
                      "tool_choice": allowed("auto", name)}, ["demo"])  # fmt: skip
    assert (chat.called, chat.allowed, chat.tools, chat.one_call) == ((), (name,), TOOLS, False)
    llm = server.engine.llm
    texts = {}
    for chosen in ((), chat.allowed):
        bound = llm.maker.calling(SamplingParams(json_schema={"enum": ["rain"]}), TOOLS, (), allowed=chosen)
        texts[chosen] = bound.grammar
    assert all(f"{each}" in texts[()] for each in SCHEMAS)
    assert [each for each in SCHEMAS if each in texts[(name,)]] == [name]
    answer = server.chat("Weather?", tools=TOOLS, tool_choice=allowed("auto", name), max_tokens=5)
    assert answer.status_code == 200


@pytest.mark.parametrize(("wrong", "param", "says"), [
    ({"type": "allowed_tools"}, "", "expected an object with mode and tools"),
    (allowed("any", "get_climate"), ".mode", "expected auto or required, got 'any'"),
    (allowed("auto"), ".tools", "expected an array of at least one tool"),
    (allowed("auto", "get_climate", "nothing"), ".tools[1]", "expected one of the tools by its name, got 'nothing'"),
    (allowed("auto", 7), ".tools[0]", "expected one of the tools"),
], ids=str)  # fmt: skip
def test_allowed_tools_that_there_are_not(server, wrong, param, says):
    error = server.chat(tools=TOOLS, tool_choice=wrong).json()["error"]
    assert error["param"] == f"tool_choice.allowed_tools{param}" and says in error["message"]
    inner = wrong.get("allowed_tools")
    flat = {"type": "allowed_tools"} | (inner or {})
    body = {"input": "?", "tools": [{"type": "function", **tool["function"]} for tool in TOOLS], "tool_choice": flat}
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tool_choice")


def test_responses_of_allowed_tools(client):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_climate"}]}
    fields = {"model": "demo", "input": "Weather?", "tools": tools, "parallel_tool_calls": False}
    answer = client.responses.create(**fields, tool_choice=choice)
    assert [item.name for item in answer.output] == ["get_climate"]


def test_calls_are_streamed(client):
    whole = asked(client, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls[0].function
    name, arguments, reason, pieces = "", "", None, 0
    for chunk in asked(client, tool_choice="required", parallel_tool_calls=False, stream=True):
        (choice,) = chunk.choices
        for call in choice.delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            pieces += bool(call.function.arguments)
        reason = choice.finish_reason or reason
    assert (name, arguments, reason) == (whole.name, whole.arguments, "tool_calls") and pieces > 1


def streamed(client, **fields):
    """Return the content, the calls and the finish reason that the deltas of a stream add up to."""
    content, calls, reason = "", [], None
    for chunk in asked(client, stream=True, **fields):
        (choice,) = chunk.choices
        content, reason = content + (choice.delta.content or ""), choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            if part.id:
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments or ""
    return content, calls, reason


@pytest.mark.parametrize("limit", [2, 8, 20, 32, 48, 70])
def test_a_cut_answer_has_no_markup(client, limit):
    fields = {"tool_choice": "required", "max_tokens": limit}
    (choice,) = asked(client, **fields).choices
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    assert choice.finish_reason == "length" and not choice.message.content
    assert streamed(client, **fields) == ("", calls, "length")
    assert {name for name, _ in calls} <= set(SCHEMAS) and (calls or limit < 32)


def test_a_call_that_a_stop_string_cuts_is_none_to_make(client):
    fields = {"tool_choice": "required", "stop": ["city"]}
    (choice,) = asked(client, **fields).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "stop" and call.function.arguments == "{"
    assert streamed(client, **fields) == ("", [[call.function.name, "{"]], "stop")


@pytest.mark.parametrize("limit", [2, 20, 48])
def test_cut_responses_have_no_markup(client, limit):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields = {"model": "demo", "input": "Weather?", "tools": tools, "tool_choice": "required"}
    whole = client.responses.create(**fields, max_output_tokens=limit)
    (*_, last) = client.responses.create(**fields, max_output_tokens=limit, stream=True)
    for answer in (whole, last.response):
        assert answer.status == "incomplete" and all(item.type == "function_call" for item in answer.output)
    assert [item.arguments for item in whole.output] == [item.arguments for item in last.response.output]


@pytest.mark.parametrize("limit", [2, 20, 32, 48, 70])
def test_cut_messages_have_whole_calls_alone(server, limit):
    client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    fields = {"model": "demo", "messages": [{"role": "user", "content": "?"}], "tools": tools, "max_tokens": limit}
    whole = client.messages.create(**fields, tool_choice={"type": "any"})
    with client.messages.stream(**fields, tool_choice={"type": "any"}) as stream:
        last = stream.get_final_message()
    for answer in (whole, last):
        assert answer.stop_reason == "max_tokens" and all(block.type == "tool_use" for block in answer.content)
        assert all(isinstance(block.input, dict) and "city" in block.input for block in answer.content)
    assert [block.input for block in whole.content] == [block.input for block in last.content]


def test_messages_of_anthropic(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_climate"}):
        answer = client.messages.create(
            model="demo", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice=choice, max_tokens=400
        )
        (block,) = answer.content
        assert block.type == "tool_use" and answer.stop_reason == "tool_use"
        jsonschema.validate(block.input, SCHEMAS[block.name])


@pytest.mark.parametrize("choice", [
    "sometimes", {"type": "function"}, {"type": "function", "function": {"name": "nothing"}}, 5, ["required"],
], ids=str)  # fmt: skip
def test_choices_that_there_are_not(server, choice):
    answer = server.chat(tools=TOOLS, tool_choice=choice)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"


def test_a_call_and_another_form_exclude_each_other(server):
    answer = server.chat(tools=TOOLS, tool_choice="required", guided_regex="a")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex"


def test_a_schema_leaves_room_for_calls(client, server):
    """With a schema and tools that need not be called, an answer is either calls or JSON of the schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["rain", "sun"]}}}
    (choice,) = asked(client, response_format=wanted, parallel_tool_calls=False).choices
    if choice.message.tool_calls:
        check(choice.message.tool_calls)
    else:
        assert json.loads(choice.message.content) in ("rain", "sun")
    llm = server.engine.llm
    bound = llm.maker.calling(SamplingParams(json_schema={"enum": ["rain"]}), TOOLS, ())
    allowed = llm.maker.forms.grammars.matcher(bound.form, Thought())().allowed()
    firsts = {llm.tokenizer.written_bytes(token)[:1] for token in range(4096) if allowed[token // 8] >> token % 8 & 1}
    assert firsts == {b"<", b'"'}


def test_a_form_binds_behind_the_thought(server):
    """A form binds only after the thought, which the template opens and its budget closes; the thought itself is
    free."""
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["rain", "sun"]}}}
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 12, **SAMPLED}
    message = server.chat("Weather?", response_format=wanted, **fields).json()["choices"][0]["message"]
    assert message["reasoning_content"] and json.loads(message["content"]) in ("rain", "sun")
    free = server.chat("Weather?", **fields | {"max_tokens": 12}).json()["choices"][0]["message"]
    assert free["reasoning_content"] == message["reasoning_content"]


def test_python_has_the_calls_too(server):
    llm, messages = server.engine.llm, [{"role": "user", "content": "Weather?"}]
    answer = llm.chat(messages, SamplingParams(max_new_tokens=400, seed=2), tools=TOOLS, tool_choice="get_weather")
    (call,) = answer.tool_calls
    assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS["get_weather"])
    assert llm.chat(messages, SamplingParams(max_new_tokens=4), tools=TOOLS, tool_choice="none").tool_calls == ()
    with pytest.raises(RequestError, match="tool_choice: expected .* one of the tools by its name, .* got 'nothing'"):
        llm.chat(messages, tools=TOOLS, tool_choice="nothing")
    with pytest.raises(RequestError, match="expected auto or none without tools, got 'required'"):
        llm.chat(messages, tool_choice="required")
    with pytest.raises(RequestError, match="no other form"):
        llm.chat(messages, SamplingParams(regex="a"), tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("name", SCHEMAS)
def test_python_has_allowed_tools_too(server, monkeypatch, name):
    maker, messages, params = server.engine.llm.maker, [{"role": "user", "content": "Weather?"}], SamplingParams()
    (job,), _ = maker.chat_groups([messages], params, TOOLS, allowed("auto", name))
    assert list(job[0].request.prompt_ids) == server.engine.llm.chat_prompt(messages, tools=TOOLS)
    assert (list(job[0].schemas), job[0].only_known) == ([name], True)
    bound = []
    monkeypatch.setattr(maker, "groups", lambda prompts, params, numbers: (bound.append(params) or [], False))
    named = {"type": "function", "function": {"name": name}}
    for choice in (allowed("auto", name), allowed("required", name), name, named):
        maker.chat_groups(messages, params, TOOLS, choice)
    assert all([each for each in SCHEMAS if each in settings.grammar] == [name] for settings in bound)
    assert [settings.grammar_trigger is not None for settings in bound] == [True, False, False, False]
    assert bound[1] != bound[2] == bound[3]  # only a tool that is named itself is called once


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_no_choice_in_python_is_auto(server, tools):
    maker, said = server.engine.llm.maker, [{"role": "user", "content": "?"}]
    (one,), (other,) = (maker.chat_groups(said, None, tools, choice)[0] for choice in (None, "auto"))
    assert one[0].schemas == other[0].schemas and one[0].request.prompt_ids == other[0].request.prompt_ids


@pytest.mark.parametrize(("choice", "says"), [
    (allowed("any", "get_climate"), "tool_choice.allowed_tools.mode: expected auto or required, got 'any'"),
    (allowed("auto"), "tool_choice.allowed_tools.tools: expected an array of at least one tool"),
    ({"type": "allowed_tools"}, "tool_choice.allowed_tools: expected an object with mode and tools, got None"),
    ({"name": "get_climate"}, "tool_choice: expected auto, none, required, one of the tools by its name"),
    ("", "tool_choice: expected auto, none, required, one of the tools by its name, or allowed_tools, got ''"),
])  # fmt: skip
def test_python_refuses_choices_of_another_form(server, choice, says):
    with pytest.raises(RequestError, match=re.escape(says)):
        server.engine.llm.chat([{"role": "user", "content": "?"}], tools=TOOLS, tool_choice=choice)


@pytest.mark.parametrize(("tools", "says"), [
    (7, "tools: expected a list"),
    ([7], "tools[0]: expected a JSON schema function"),
    ([{"name": "flat", "input_schema": {}}], "tools[0]: expected {"),
    ([*TOOLS, {"type": "function", "function": {"parameters": {}}}], f"tools[{len(TOOLS)}]: expected {{"),
    ([{"type": "function", "function": {"name": "f", "parameters": 7}}], "tools[0].function.parameters: expected"),
])  # fmt: skip
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_of_another_form_are_refused(server, tools, says, choice):
    with pytest.raises(RequestError, match=re.escape(says)):
        server.engine.llm.chat([{"role": "user", "content": "?"}], tools=tools, tool_choice=choice)


def test_instructor_and_pydantic_ai(server):
    """Both clients get their types from a model that knows nothing, since the grammar allows nothing else."""
    instructor = pytest.importorskip("instructor")
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Weather(BaseModel):
        is_raining: bool
        days: int

    url = f"{server.url}/v1"
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="x"), mode=instructor.Mode.TOOLS)
    ask = [{"role": "user", "content": "Weather?"}]
    found = client.chat.completions.create(model="demo", messages=ask, response_model=Weather, max_tokens=200)
    assert isinstance(found, Weather)
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=url, api_key="x"))
    settings = {"max_tokens": 200, "parallel_tool_calls": False}  # an untrained model would call without end
    agent = pydantic_ai.Agent(model, output_type=Weather, model_settings=settings)
    assert isinstance(agent.run_sync("Weather?").output, Weather)
    agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Weather), model_settings=settings)
    assert isinstance(agent.run_sync("Weather?").output, Weather)
