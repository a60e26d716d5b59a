"""Streams with `echo` and `logprobs`: while prompts are scored, clients get the status and signs of life."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from serving import saying_llm, serving
from timing import until

from cpmrt.errors import CpmrtError, RequestError
from cpmrt.server import exchange, responses
from cpmrt.server.prompt_scores import PromptScores

ASKED = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 2, "stream": True}


@pytest.fixture
def scoring(tmp_path):
    """A server whose executor calls `server.wait()` before it scores a prompt."""
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "xyz")) as server:
        server.chunks = 0

        def logits(slot, ids, table=()):
            server.chunks += 1
            server.wait()
            yield np.zeros((len(ids), server.engine.llm.config.vocab_size), np.float32)

        server.engine.llm.engine.executor.prompt_logits = logits
        server.wait = lambda: None
        yield server


@pytest.fixture
def quick_signs(monkeypatch):
    monkeypatch.setattr(exchange, "PING_S", 0.1)
    monkeypatch.setattr(responses, "_FIRST_WAIT_S", 0.2)


def blocked(server):
    """Have scoring wait. Returns a list; with something in it the server goes on."""
    go = []
    server.wait = lambda: until(lambda: go, 10)
    return go


def events_of(lines):
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_the_status_and_signs_of_life_come_during_the_scoring(scoring, quick_signs):
    go, lines = blocked(scoring), []
    with scoring.client.stream("POST", "/v1/completions", json=ASKED, timeout=5) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            lines.append(line)
            if lines.count(": ping") == 3 and not go:
                assert not events_of(lines)
                go.append(True)
    choices = [event["choices"][0] for event in events_of(lines)]
    whole = scoring.client.post("/v1/completions", json=ASKED | {"stream": False}).json()["choices"][0]
    assert choices[0]["text"] == "abc" and "".join(choice["text"] for choice in choices) == whole["text"] == "abcxy"
    streamed = sum((choice["logprobs"]["tokens"] for choice in choices if choice["logprobs"]), [])
    assert streamed == whole["logprobs"]["tokens"] and len(streamed) == 4 + 2


def failing(error, go):
    def wait():
        until(lambda: go, 10)
        raise error

    return wait


@pytest.mark.parametrize(("error", "status"), [(RequestError("no"), 400), (CpmrtError("no"), 500)])
def test_an_early_error_of_the_scoring_is_a_status(scoring, error, status):
    scoring.wait = failing(error, [True])
    for is_stream in (True, False):
        answer = scoring.client.post("/v1/completions", json=ASKED | {"stream": is_stream})
        assert answer.status_code == status and answer.json()["error"]["message"]
    scoring.wait_idle()


@pytest.mark.parametrize("error", [CpmrtError("no"), ValueError("no")])
def test_a_late_error_of_the_scoring_is_the_last_event(scoring, quick_signs, error):
    go, lines = [], []
    scoring.wait = failing(error, go)
    with scoring.client.stream("POST", "/v1/completions", json=ASKED, timeout=5) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            lines.append(line)
            go.append(True)
    (event,) = events_of(lines)
    assert event["error"]["message"] and not event["error"]["message"].startswith("an answer")
    scoring.wait_idle()


def test_a_queue_that_is_full_after_the_scoring_is_told(scoring, quick_signs, monkeypatch):
    go, lines = blocked(scoring), []
    with scoring.client.stream("POST", "/v1/completions", json=ASKED, timeout=5) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if not go:
                monkeypatch.setattr(scoring.engine, "_max_queue", -100)
                go.append(True)
    (event,) = events_of(lines)
    assert event["error"]["code"] == "queue_full"


@pytest.mark.parametrize("silence_s", [0.0, 0.4])
def test_a_client_that_leaves_ends_the_scoring_and_gets_no_slot(scoring, quick_signs, monkeypatch, silence_s):
    go, told, cancel = blocked(scoring), [], PromptScores.cancel
    monkeypatch.setattr(PromptScores, "cancel", lambda scores: told.append(cancel(scores)))
    with scoring.client.stream("POST", "/v1/completions", json=ASKED | {"prompt": ["a", "b"]}, timeout=5) as answer:
        assert answer.status_code == 200
        time.sleep(silence_s)
    until(lambda: told)
    go.append(True)
    scoring.wait_idle()
    until(lambda: scoring.running.service.prompt_workers._num_running == 0)
    time.sleep(0.1)
    assert scoring.chunks == 1 and scoring.metric("cpmrt_generated_tokens_total") == 0
