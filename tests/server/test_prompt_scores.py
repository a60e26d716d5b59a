"""`echo` with `logprobs`: the log-probabilities of the prompt, against `LLM.logits` of the same model."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from serving import saying_llm, serving
from timing import until

from cpmrt import LLM
from cpmrt.server.prompt_scores import token_logprobs

PROMPT = "import os\n\ndef read_lines(path):\n    with open(path) as file:\n"


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_context=512, prefill_chunk=64) as model:
        yield model


def ask(server, **fields):
    answer = server.client.post("/v1/completions", json={"echo": True, "max_tokens": 0, "logprobs": 3} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(llm, ids):
    """Return float64 log-probabilities at every position."""
    logits = llm.logits(ids).astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(
        -1, keepdims=True
    )


def test_they_are_those_of_the_model(demo, llm):
    (choice,) = ask(demo, prompt=PROMPT)["choices"]
    logprobs, ids = choice["logprobs"], llm.tokenizer.encode(PROMPT)
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert len(logprobs["tokens"]) == len(ids) and "".join(logprobs["tokens"]) == "<s>" + PROMPT
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    rows = expected(llm, ids)
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], rows[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    for row, top, own in zip(rows, logprobs["top_logprobs"][1:], logprobs["tokens"][1:], strict=False):
        best = sorted(top.values(), reverse=True)[:3]
        assert best == pytest.approx(np.sort(row)[::-1][: len(best)], abs=1e-4) and own in top
        best = llm.tokenizer.token_bytes(int(row.argmax())) or llm.tokenizer.written_bytes(int(row.argmax()))
        assert max(top, key=top.get) == best.decode("utf-8", "replace")


def test_new_tokens_follow_those_of_the_prompt(demo, llm):
    ids = llm.tokenizer.encode(PROMPT)
    alone = ask(demo, prompt=PROMPT)["choices"][0]["logprobs"]
    answer = ask(demo, prompt=ids, max_tokens=4, temperature=0, ignore_eos=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][: len(ids)] == alone["token_logprobs"] and len(logprobs["tokens"]) == len(ids) + 4
    assert all(value == max(top.values()) for value, top in zip(
        logprobs["token_logprobs"][len(ids):], logprobs["top_logprobs"][len(ids):], strict=True
    ))  # fmt: skip
    text, tokens = answer["choices"][0]["text"], logprobs["tokens"]
    assert tokens[0] == "<s>" and logprobs["text_offset"][:2] == [0, 0], "BOS is no part of the text"
    special = [token for token in tokens if token in ("<s>", "</s>")]
    assert text.startswith(PROMPT) and "".join(token for token in tokens if token not in special) == text
    for token, at in zip(tokens, logprobs["text_offset"], strict=True):
        assert token in special or text.startswith(token, at)
    assert answer["usage"]["prompt_tokens"] == len(ids) and answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("prompt", ["a", "x = \"日本\" 😀\n", " a", "<s>a", "a</s>b"])
def test_offsets_are_places_in_the_text(demo, llm, prompt, as_ids):
    ids = llm.tokenizer.encode(prompt)
    (choice,) = ask(demo, prompt=ids if as_ids else prompt, max_tokens=3, temperature=0, ignore_eos=True)["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    offsets, tokens = logprobs["text_offset"], logprobs["tokens"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and len(offsets) == len(tokens) == len(ids) + 3
    for token, at, following in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        assert text[at:following] == token or following == at or "\ufffd" in token
    echoed = llm.tokenizer.decode(ids) if as_ids else prompt
    assert offsets[len(ids)] == len(echoed)


def test_an_end_token_has_its_place_too(says):
    """An end token has its place in the lists too, as clients cut them by counting tokens."""
    answer = ask(says_scoring(says), prompt="say()yas", max_tokens=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"] + 1 and logprobs["tokens"][-1] == "</s>"


def says_scoring(server):
    """Return the server after making its executor give logits, all of them equal."""
    executor, vocab = server.engine.llm.engine.executor, server.engine.llm.config.vocab_size
    executor.prompt_logits = lambda slot, ids, table=(): iter([np.zeros((len(ids), vocab), np.float32)])
    return server


def test_several_prompts_choices_and_streams(demo):
    prompts = [PROMPT, "x = 1"]
    together = ask(demo, prompt=prompts, n=2, max_tokens=2, seed=5)
    assert len(together["choices"]) == 4
    alone = [ask(demo, prompt=prompt)["choices"][0]["logprobs"]["token_logprobs"] for prompt in prompts]
    for index, choice in enumerate(together["choices"]):
        of_prompt = alone[index // 2]
        assert choice["logprobs"]["token_logprobs"][: len(of_prompt)] == of_prompt
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    import json

    lines = demo.client.post("/v1/completions", json=fields | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    whole = demo.client.post("/v1/completions", json=fields).json()["choices"][0]
    assert "".join(event["text"] for event in events) == whole["text"]
    streamed = [value for event in events for value in (event["logprobs"] or {"token_logprobs": []})["token_logprobs"]]
    assert streamed == whole["logprobs"]["token_logprobs"]


def test_no_token_without_logprobs_is_the_prompt_alone(demo):
    answer = demo.client.post("/v1/completions", json={"prompt": PROMPT, "echo": True, "max_tokens": 0}).json()
    assert answer["choices"][0]["text"] == PROMPT and answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 0 < answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"echo": False}, "max_tokens"),
    ({"stream": True}, "max_tokens"),
    ({"prompt": [5] * 513}, None),
    ({"prompt": []}, "prompt"),
])  # fmt: skip
def test_what_is_refused(demo, fields, param):
    body = {"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": 1} | fields
    answer = demo.client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_scoring_waits_for_a_slot_and_holds_up_no_stream(demo):
    """While four answers hold all slots a score waits until one ends, and is right."""
    alone = ask(demo, prompt=PROMPT)["choices"][0]["logprobs"]
    found = []
    streams = [threading.Thread(target=lambda: found.append(demo.client.post("/v1/completions", json={
        "prompt": "x", "max_tokens": 60, "ignore_eos": True,
    }).json()["usage"]["completion_tokens"])) for _ in range(4)]  # fmt: skip
    for stream in streams:
        stream.start()
    deadline = time.monotonic() + 30
    while len(demo.engine.llm.engine.running) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert ask(demo, prompt=PROMPT)["choices"][0]["logprobs"] == alone
    for stream in streams:
        stream.join()
    assert found == [60] * 4
    demo.wait_idle()


def test_a_client_that_leaves_ends_its_scoring(tmp_path):
    import json
    import socket
    from urllib.parse import urlsplit

    chunks = []

    def logits(slot, ids, table=()):
        for _ in ids:
            chunks.append(time.monotonic())
            time.sleep(0.01)
            yield np.zeros((1, 259), np.float32)

    with serving(lambda: saying_llm(tmp_path, str)) as server:
        executor = says_scoring(server).engine.llm.engine.executor
        executor.prompt_logits = logits
        parts = urlsplit(server.url)
        content = json.dumps({"prompt": ["x" * 900] * 3, "echo": True, "max_tokens": 0, "logprobs": 1}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        head += f"\r\ncontent-length: {len(content)}"
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + content)
            until(lambda: len(chunks) >= 5)
        until(lambda: server.engine.llm.engine.slots.free == (3, 2, 1, 0), 8)  # a prompt alone takes 9 s
        seen = len(chunks)
        time.sleep(0.2)
        assert len(chunks) == seen < 900
        assert server.chat("fine").status_code == 200


def test_the_most_likely_tokens_are_those_of_a_sort():
    random = np.random.default_rng(3)
    logits = random.standard_normal((7, 50)).astype(np.float32)
    for count in (0, 1, 2, 20):
        for row, entry in zip(logits, token_logprobs(logits, [4] * 7, count, 1), strict=True):
            assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[:count].tolist()
            normaliser = np.log(np.exp(row.astype(np.float64)).sum())
            assert entry.logprob == pytest.approx(float(row[4]) - normaliser, abs=1e-5)
