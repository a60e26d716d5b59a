"""Metrics of speculative steps in `/metrics`."""

from __future__ import annotations

import pytest
from serving import serving

from cpmrt import LLM

QUESTION = "What does os.path.join do? What does os.path.join do? What does"


@pytest.fixture(scope="module")
def server():
    with serving(lambda: LLM(executor="reference", max_context=256, draft="lookup")) as running:
        yield running


def test_metrics_count_speculative_steps_and_their_tokens(server):
    names = ("cpmrt_speculative_steps_total", "cpmrt_speculative_tokens_total", "cpmrt_accept_length_count")
    before = [server.metric(name) for name in names]
    for count in (1, 2):
        server.chat(QUESTION, max_tokens=20, temperature=0, ignore_eos=True)
        steps, tokens, sequences = (server.metric(name) - old for name, old in zip(names, before, strict=True))
        assert tokens == 19 * count, "the first token comes from the prefill"
        assert 0 < steps <= tokens and sequences == count


def test_usage_and_logprobs_end_with_the_token_that_completes_a_stop_string(server):
    ask = {"max_tokens": 40, "temperature": 0, "logprobs": True}
    free = server.chat(QUESTION, **ask).json()["choices"][0]["logprobs"]["content"]
    tokens = [entry["token"] for entry in free]
    for count in range(3, 12):
        stop = tokens[count - 1]
        answer = server.chat(QUESTION, stop=stop, **ask).json()
        (choice,) = answer["choices"]
        end = next(end for end in range(1, len(tokens) + 1) if stop in "".join(tokens[:end]))
        assert choice["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == end
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == tokens[:end]
