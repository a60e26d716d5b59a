"""Cached tokens of a conversation, as usage, metrics and log line show them."""

from __future__ import annotations

import pytest
from serving import serving

from cpmrt import LLM

FIRST = [{"role": "user", "content": "What does os.path.join do? " * 8}]


@pytest.fixture(scope="module")
def server():
    with serving(lambda: LLM(executor="reference", max_sequences=2, max_context=256)) as running:
        yield running


def chat(server, messages):
    fields = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.client.post("/v1/chat/completions", json=fields).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


def test_the_second_turn_finds_the_first(server):
    before = server.metric("cpmrt_cached_tokens_total")
    text, usage = chat(server, FIRST)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 and usage["prompt_tokens"] > 64
    messages = [*FIRST, {"role": "assistant", "content": text}, {"role": "user", "content": "And on Windows?"}]
    _, again = chat(server, messages)
    assert again["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 64 * 64
    assert server.metric("cpmrt_cached_tokens_total") - before == usage["prompt_tokens"] // 64 * 64
    assert server.metric("cpmrt_kv_pages_used") == 0


def test_the_choices_of_a_later_request_share_a_prompt(server):
    messages = [{"role": "user", "content": "Explain json.dumps. " * 12}]
    fields = {"messages": messages, "max_tokens": 4, "n": 2, "seed": 1, "temperature": 1}
    answers = [server.client.post("/v1/chat/completions", json=fields).json() for _ in range(2)]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64, "counted once, as the prompt is"
    assert answers[0]["choices"] == answers[1]["choices"]
