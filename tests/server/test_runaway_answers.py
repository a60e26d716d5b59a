"""Answers that would not end by themselves: loops, and thoughts without end, whole and streamed."""

from __future__ import annotations

import json

import pytest
from serving import saying_llm, serving

THOUGHT = "hmm, so it is! "
MESSAGES = [{"role": "user", "content": "hi"}]


def reply(prompt: str) -> str:
    """Return a very long thought, "yes" after a thought's end, or an endless answer about the weather."""
    answer = prompt.rpartition("[assistant]")[2]
    if "weather" in prompt:
        return "It rains. " * 300
    return "yes" if "</think>" in answer else THOUGHT * 40


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runaway")
    with serving(lambda: saying_llm(folder, reply), model_name="runaway") as server:
        yield server


def ask(server, text="hi", **fields):
    """Return the message, finish reason and usage of an answer, and check that they are the same streamed."""
    body = {"messages": [{"role": "user", "content": text}], "seed": 1} | fields
    whole = server.client.post("/v1/chat/completions", json=body).json()
    (choice,) = whole["choices"]
    parts, reason = {"content": "", "reasoning_content": ""}, None
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    for line in server.client.post("/v1/chat/completions", json=body | streaming).text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            for part in event["choices"]:
                reason = part["finish_reason"] or reason
                for name in parts:
                    parts[name] += part["delta"].get(name) or ""
            usage = event["usage"] or {}
    message = {name: choice["message"].get(name) or "" for name in parts}
    assert (message, choice["finish_reason"]) == (parts, reason)
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    return message, reason, whole["usage"]["completion_tokens"]


THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


def test_a_thought_is_closed_after_its_budget(server):
    message, reason, count = ask(server, max_thinking_tokens=40, **THINKS)
    assert message == {"reasoning_content": (THOUGHT * 3)[:40].rstrip(), "content": "yes"}
    assert (reason, count) == ("stop", 40 + len("\n</think>\n\n") + len("yes") + 1)


def test_a_budget_that_is_not_needed_changes_nothing(server):
    short = ask(server, max_thinking_tokens=2000, max_tokens=90, **THINKS)
    assert short == ask(server, max_tokens=90, **THINKS)


def test_log_probabilities_of_a_closed_thought(server):
    body = {"messages": MESSAGES, "max_thinking_tokens": 5, "max_tokens": 12, "logprobs": True, "top_logprobs": 1}
    whole = server.client.post("/v1/chat/completions", json=body | THINKS).json()["choices"][0]
    entries = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == THOUGHT[:5] + "\n</thin"
    assert [entry["logprob"] for entry in entries] == [-0.5] * 5 + [0] * 7
    assert [len(entry["top_logprobs"]) for entry in entries] == [1] * 5 + [0] * 7


def test_the_budget_of_anthropics_api(server):
    thinking = {"type": "enabled", "budget_tokens": 40}
    body = {"messages": MESSAGES, "max_tokens": 400, "thinking": thinking}
    answer = server.client.post("/v1/messages", json=body).json()
    parts = [part.get("thinking") or part.get("text") for part in answer["content"]]
    assert parts == [(THOUGHT * 3)[:40].rstrip(), "yes"]
    thinking["budget_tokens"] = 0
    assert "thinking.budget_tokens" in server.client.post("/v1/messages", json=body).json()["error"]["message"]


@pytest.mark.parametrize("begun", ["<think>", "<think>\nLet me see. I am asked of the world, a long story."])
def test_an_answer_goes_on_within_a_thought_that_was_begun(server, begun):
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    body = {"messages": messages, "max_tokens": 400, "max_thinking_tokens": 40}
    thought, text = server.client.post("/v1/messages", json=body).json()["content"]
    assert (thought["thinking"], text["text"]) == ((THOUGHT * 3)[:40].rstrip(), "yes")


def test_an_answer_goes_on_behind_a_thought_that_was_closed(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>hm</think>It is"}]
    body = {"messages": messages, "max_tokens": 400, "max_thinking_tokens": 40}
    (text,) = server.client.post("/v1/messages", json=body).json()["content"]
    assert text["text"] == "yes"


def test_a_loop_ends_the_answer_where_that_is_asked_for(server):
    message, reason, count = ask(server, "weather", loop_repeats=4)
    assert (reason, count) == ("loop", 128) and message["content"] == ("It rains. " * 13)[:128]
    assert ask(server, "weather", loop_repeats=20)[1:] == ("loop", 200)
    assert ask(server, "weather", loop_repeats=4, loop_penalty=1.5)[1:] == ("loop", 256)
    assert ask(server, "weather")[1] == "stop", "not unless it is asked for"


@pytest.mark.parametrize(("fields", "name"), [
    ({"loop_repeats": 1}, "loop_repeats"), ({"loop_repeats": "yes"}, "loop_repeats"),
    ({"loop_penalty": 0.5}, "loop_penalty"),
    ({"max_thinking_tokens": 0}, "max_thinking_tokens"), ({"max_thinking_tokens": 1.5}, "max_thinking_tokens"),
])  # fmt: skip
def test_bad_values_name_the_field(server, fields, name):
    answer = server.client.post("/v1/chat/completions", json={"messages": MESSAGES} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
