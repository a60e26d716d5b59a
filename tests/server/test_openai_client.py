"""The official `openai` client against a running server: the calls that programs use most."""

from __future__ import annotations

import json

import openai
import pytest
from serving import TOOL_CALLS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
ASK = [{"role": "user", "content": "What does os.path.join do?"}]


@pytest.fixture(scope="module")
def client(demo):
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def says_client(says):
    return openai.OpenAI(base_url=f"{says.url}/v1", api_key="none", max_retries=0)


def say(client, text, **fields):
    return client.chat.completions.create(
        model="says", messages=[{"role": "user", "content": f"say({text})yas"}], **fields
    )


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "cpmrt"


def test_a_chat_with_usage(client):
    answer = client.chat.completions.create(model="demo", messages=ASK, max_tokens=20, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and len(choice.message.content) > 20
    assert choice.finish_reason == "length" and answer.object == "chat.completion"
    assert answer.usage.completion_tokens == 20 and answer.usage.prompt_tokens > 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_is_the_whole_one_in_pieces(client):
    fields = {"model": "demo", "messages": ASK, "max_tokens": 20, "temperature": 0.8, "seed": 7}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_top_p_of_zero_is_greedy(client):
    fields = {"model": "demo", "messages": ASK, "max_tokens": 6}
    sampled = client.chat.completions.create(**fields, temperature=2.0, seed=3, top_p=0)
    greedy = client.chat.completions.create(**fields, temperature=0)
    assert sampled.choices[0].message.content == greedy.choices[0].message.content


def test_several_choices_have_seeds_of_their_own(client):
    fields = {"model": "demo", "messages": ASK, "max_tokens": 6, "temperature": 2.0, "seed": 3}
    answer = client.chat.completions.create(**fields, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    alone = [client.chat.completions.create(**{**fields, "seed": seed}) for seed in (3, 4)]
    assert texts[0] == alone[0].choices[0].message.content, "the first choice is the answer of n = 1"
    assert alone[1].choices[0].message.content not in texts, "nor does the next seed repeat a choice"
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client, stream):
    fields = {"model": "demo", "messages": ASK, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    if stream:
        entries = [
            entry
            for chunk in client.chat.completions.create(**fields, stream=True)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
    else:
        entries = client.chat.completions.create(**fields).choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token == entry.top_logprobs[0].token


def test_logprobs_without_top_ones(client):
    answer = client.chat.completions.create(model="demo", messages=ASK, max_tokens=3, temperature=0, logprobs=True)
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content] == [[], [], []]


def test_completions_of_text_and_of_token_ids(demo, client):
    ids = demo.client.post("/tokenize", json={"prompt": "import os\n"}).json()["tokens"]
    fields = {"model": "demo", "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(prompt=["import os\n", "def f("], **fields)
    assert [choice.index for choice in answer.choices] == [0, 1]
    by_ids = client.completions.create(prompt=ids, **fields)
    assert by_ids.choices[0].text == answer.choices[0].text and by_ids.object == "text_completion"
    both = client.completions.create(prompt=[ids, ids], n=2, **fields)
    assert {choice.text for choice in both.choices} == {by_ids.choices[0].text} and len(both.choices) == 4
    assert both.usage.prompt_tokens == 2 * len(ids) and both.usage.completion_tokens == 32


@pytest.mark.all
def test_answers_go_on_until_the_context_is_full_unless_told(client):
    fields = {"model": "demo", "temperature": 0, "extra_body": {"ignore_eos": True}}
    completion = client.completions.create(prompt="import os\n", **fields)
    chat = client.chat.completions.create(messages=ASK, **fields)
    context = client.models.retrieve("demo").max_model_len
    for answer in (completion, chat):
        assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (context, "length")


def test_the_model_says_how_it_samples_by_default(client):
    defaults = client.models.retrieve("demo").sampling_defaults
    assert defaults == {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "loop_penalty": 1.0, "source": "generation_config.json",
    }  # fmt: skip
    texts = [
        client.completions.create(model="demo", prompt="def main():", max_tokens=8, **fields).choices[0].text
        for fields in ({}, {}, {"temperature": 0}, {"extra_body": {"temperature": None}})
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(client, stream):
    answer = client.completions.create(
        model="demo", prompt="import os\n", echo=True, max_tokens=4, temperature=0, stream=stream
    )
    text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
    assert text.startswith("import os\n") and len(text) > len("import os\n")


def test_logprobs_of_a_completion(client):
    answer = client.completions.create(model="demo", prompt="import os\n", max_tokens=5, temperature=0, logprobs=3)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert "".join(logprobs.tokens) == text and len(logprobs.token_logprobs) == 5
    pairs = list(zip(logprobs.text_offset, logprobs.tokens, strict=True))
    assert all(text.startswith(token, at) for at, token in pairs)
    assert all(len(top) == 3 for top in logprobs.top_logprobs)


def test_stop_strings_end_before_themselves(says_client):
    answer = say(says_client, "one two three", stop=["two", "zwei"])
    assert answer.choices[0].message.content == "one " and answer.choices[0].finish_reason == "stop"
    streamed = say(says_client, "one two three", stop="three", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "one two "


def test_stop_token_ids_and_ignore_eos(says_client):
    answer = say(says_client, "abc", extra_body={"stop_token_ids": [says_client_id(says_client, "b")]})
    assert answer.choices[0].message.content == "a" and answer.choices[0].finish_reason == "stop"


def says_client_id(client, text):
    root = client.base_url.copy_with(path="/tokenize")
    return client._client.post(root, json={"prompt": text, "add_special_tokens": False}).json()["tokens"][0]


def test_logit_bias_bans_a_token(client):
    fields = {"model": "demo", "prompt": "import os\n", "max_tokens": 1, "temperature": 0}
    usual = client.completions.create(**fields, logprobs=1)
    token = usual.choices[0].logprobs.tokens[0]
    ids = client._client.post(client.base_url.copy_with(path="/tokenize"), json={"prompt": "import os\nimport"}).json()
    banned = client.completions.create(**fields, logit_bias={str(ids["tokens"][-1]): -100})
    assert token == usual.choices[0].text == "import" and banned.choices[0].text != token


def test_thinking_goes_to_reasoning_content(says_client):
    answer = say(says_client, "<think>\nhm, 1 < 2\n</think>\n\nYes.")
    assert answer.choices[0].message.content == "Yes."
    assert answer.choices[0].message.reasoning_content == "hm, 1 < 2"
    thoughts, text = "", ""
    for chunk in say(says_client, "<think>hm</think>Yes <think>", stream=True):
        thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        text += chunk.choices[0].delta.content or ""
    assert (thoughts, text) == ("hm", "Yes <think>")


def test_marks_that_are_special_tokens_are_found_too(tmp_path):
    from serving import TOOL_TEMPLATE, saying_llm, serving
    from tiny_checkpoint import write_checkpoint
    from tokenizers import Tokenizer

    write_checkpoint(tmp_path, vocab_size=261)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(["<think>", "</think>"])
    library.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TOOL_TEMPLATE}))
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "<think>hm</think>yes")) as server:
        message = server.chat("x").json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        plain = server.client.post("/v1/completions", json={"prompt": "x"}).json()
        assert plain["choices"][0]["text"] == "hmyes"


def test_a_thought_that_the_prompt_opened(says_client):
    fields = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = say(says_client, "so it is</think>\nYes.", **fields).choices[0].message
    assert (message.reasoning_content, message.content) == ("so it is", "Yes.")


@pytest.mark.parametrize("text", TOOL_CALLS.values(), ids=TOOL_CALLS)
def test_tool_calls(says_client, text):
    choice = say(says_client, text, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Sure."
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": "Köln", "days": 2}


def test_tool_calls_are_streamed_as_deltas(says_client):
    text = "".join(TOOL_CALLS.values())
    name, arguments, content, reasons = ["", "", ""], ["", "", ""], "", []
    for chunk in say(says_client, text, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for call in delta.tool_calls or ():
            name[call.index] += call.function.name or ""
            arguments[call.index] += call.function.arguments or ""
    assert name == ["weather"] * 3 and content == "Sure.Sure.\nSure." and reasons[-1] == "tool_calls"
    assert [json.loads(each) for each in arguments] == [{"city": "Köln", "days": 2}] * 3


def test_tools_and_their_results_reach_the_template(says_client):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "is it?"}]},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]  # fmt: skip
    shown = says_client.chat.completions.create(model="says", messages=messages, tools=TOOLS).choices[0].message.content
    assert "[tools][{" in shown and '"weather"' in shown
    assert "[system]be brief[user]how is it?" in shown
    assert '"arguments": {"city": "Bonn"}' in shown and shown.endswith("[tool]rain[assistant]")


def test_without_tools_their_marks_are_text(says_client):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert say(says_client, TOOL_CALLS["hermes"], **fields).choices[0].message.content == TOOL_CALLS["hermes"]


@pytest.mark.parametrize(("fields", "error", "param"), [
    ({"model": "gpt-4"}, openai.NotFoundError, "model"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"top_p": -0.1}, openai.BadRequestError, "top_p"),
    ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, openai.BadRequestError, "max_tokens"),
    ({"n": 0}, openai.BadRequestError, "n"),
    ({"n": 17}, openai.BadRequestError, "n"),
    ({"stop": [""]}, openai.BadRequestError, "stop[0]"),
    ({"seed": 1.5}, openai.BadRequestError, "seed"),
    ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
    ({"response_format": {"type": "json"}}, openai.BadRequestError, "response_format.type"),
    ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
    ({"tools": TOOLS}, openai.BadRequestError, "tools"),
    ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "cook", "content": "x"}]}, openai.BadRequestError, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, None),
])  # fmt: skip
def test_what_is_refused_names_the_field(client, fields, error, param):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "demo", "messages": ASK} | fields)
    assert caught.value.type in ("invalid_request_error", "not_found_error") and caught.value.message
    if param:
        assert caught.value.param == param


@pytest.mark.parametrize(("fields", "param"), [
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"prompt": [[1, 2], "x", {}]}, "prompt[2]"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": []}, "prompt"),
])  # fmt: skip
def test_what_completions_refuse(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "demo", "prompt": "x"} | fields)
    assert caught.value.param == param


def test_unknown_fields_and_nulls_are_ignored(client):
    fields = {"user": "me", "top_p": None, "metadata": None, "whatever": {"a": 1}, "min_p": 0.1, "top_k": -1}
    answer = client.chat.completions.create(model="demo", messages=ASK, max_tokens=2, extra_body=fields)
    assert answer.usage.completion_tokens == 2


def test_the_best_of_several_choices_are_those_with_the_best_mean_logprob(client):
    fields = {"model": "demo", "prompt": "def read(", "max_tokens": 6, "temperature": 1.5, "seed": 11}
    tried = client.completions.create(**fields, n=5, logprobs=1).choices

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = sorted(tried, key=mean, reverse=True)[:2]
    kept = client.completions.create(**fields, n=2, best_of=5)
    assert [choice.text for choice in kept.choices] == [choice.text for choice in best]
    assert [choice.index for choice in kept.choices] == [0, 1] and kept.choices[0].logprobs is None
    assert kept.usage.completion_tokens == 30, "all that were tried"


def test_closing_a_stream_frees_its_slot(demo, client):
    stream = client.chat.completions.create(model="demo", messages=ASK, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert demo.engine.open_jobs
    stream.close()
    demo.wait_idle()
    assert demo.metric("cpmrt_sequences_running") == 0
