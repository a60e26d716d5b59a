"""`continuous_usage_stats`: each chunk of a stream has the usage so far."""

from __future__ import annotations

import json

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def chunks_of(server, path, options, text="say(hello)yas", **fields):
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    answer = server.client.post(path, json={**prompt, "stream": True, "stream_options": options, **fields})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def parts(chunks):
    """Return the chunks without what differs from answer to answer."""
    return [{name: chunk[name] for name in chunk if name not in ("id", "created", "usage")} for chunk in chunks]


@pytest.mark.parametrize("fields", [
    {}, {"n": 2}, {"logprobs": 1}, {"prompt": ["say(a)yas", "say(bcd)yas"]}, {"echo": True}, {"max_tokens": 2},
    {"tools": TOOLS},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_each_chunk_has_the_usage_so_far(says, path, fields):
    if path == CHAT and set(fields) & {"prompt", "echo"} or path == COMPLETIONS and "tools" in fields:
        pytest.skip("no field of this endpoint")
    if path == CHAT and "logprobs" in fields:
        fields = {"logprobs": True}
    *chunks, last = chunks_of(says, path, {"include_usage": True, "continuous_usage_stats": True}, seed=1, **fields)
    usages, usage = [chunk["usage"] for chunk in chunks], last["usage"]
    assert last["choices"] == [] and all(chunk["choices"] for chunk in chunks)
    for each in usages:
        assert each["prompt_tokens"] == usage["prompt_tokens"]
        assert each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"]
    counts = [each["completion_tokens"] for each in usages]
    assert counts == sorted(counts) and counts[0] <= 1 and counts[-1] == usage["completion_tokens"]
    plain = chunks_of(says, path, {"include_usage": False}, seed=1, **fields)
    assert sorted(map(str, parts(chunks))) == sorted(map(str, parts(plain)))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_it_is_counted_token_by_token(says, path):
    chunks = chunks_of(says, path, {"continuous_usage_stats": True})
    texts = [chunk["choices"][0]["delta"].get("content") if path == CHAT else chunk["choices"][0]["text"]
             for chunk in chunks]  # fmt: skip
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert dict(zip(texts, counts, strict=True)) | {"": None, None: None} == {
        "h": 1, "e": 2, "l": 4, "o": 5, "": None, None: None,
    }  # fmt: skip
    assert counts[-1] == 6, "the token that ends the text counts too"


@pytest.mark.parametrize("options", [{"continuous_usage_stats": False}, {"continuous_usage_stats": None}, {}], ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_without_it_no_chunk_has_a_usage(says, path, options):
    assert not any("usage" in chunk for chunk in chunks_of(says, path, options))


@pytest.mark.parametrize("value", [1, "true", {}, []], ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_no_boolean_is_an_error_of_the_field(says, path, value):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    options = {"stream": True, "stream_options": {"continuous_usage_stats": value}}
    answer = says.client.post(path, json=prompt | options)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "stream_options.continuous_usage_stats"
    assert error["message"].startswith("stream_options.continuous_usage_stats: expected true or false")
