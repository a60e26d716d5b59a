"""Objects of a request: none is left when it is over, not even for the garbage collector, which may run much later."""

from __future__ import annotations

import gc
import time
from collections import Counter

import numpy as np
import pytest

LOOPS = 10
MANY = dict.fromkeys(map(str, range(2000)), 1)
CHAT = {"messages": [{"role": "user", "content": "say(ok)yas"}]}
REQUESTS = {
    "a chat": ("/v1/chat/completions", CHAT),
    "a stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 3, "stream": True, "logprobs": True}),
    "a chat that is refused": ("/v1/chat/completions", {**CHAT, "n": "x"}),
    "more biases than the engine takes": ("/v1/chat/completions", {**CHAT, "logit_bias": MANY}),
    "a completion past the context": ("/v1/completions", {"prompt": "word " * 3000}),
    "a message": ("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}),
    "a stream with the scores of its prompt": (
        "/v1/completions", {"prompt": "x", "stream": True, "echo": True, "logprobs": 1},
    ),
    "no such model": ("/v1/completions", {"prompt": "x", "model": "y"}),
}  # fmt: skip


def ours(server) -> Counter[str]:
    """Return how many objects of each of the project's classes are left once the server is idle."""
    server.wait_idle()
    time.sleep(0.05)  # the last frames of the answer
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each).__module__.startswith("cpmrt."))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_leaves_nothing_behind(says, name, monkeypatch):
    logits = np.zeros((1, says.engine.llm.config.vocab_size), np.float32)
    monkeypatch.setattr(says.engine.llm.engine.executor, "prompt_logits", lambda slot, ids, table=(): iter(
        [logits.repeat(len(ids), axis=0)]
    ))  # fmt: skip
    path, body = REQUESTS[name]
    says.client.post(path, json=body)
    gc.collect()
    gc.disable()
    try:
        before = ours(says)
        for _ in range(LOOPS):
            says.client.post(path, json=body)
        left = ours(says) - before
    finally:
        gc.enable()
    assert all(count < LOOPS for count in left.values()), left
