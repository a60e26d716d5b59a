"""/v1/embeddings with the official client, against `LLM.embed` of the same model."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest

from cpmrt import LLM
from cpmrt.server.embeddings import Embeddings
from cpmrt.server.service import ServerSettings

TEXTS = ["import os", "def read_lines(path):\n    pass", "x"]


@pytest.fixture(scope="module")
def client(demo):
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="reference", max_context=512, prefill_chunk=64) as model:
        yield model


def embed(client, **fields):
    return client.embeddings.create(**{"model": "demo", "input": TEXTS} | fields)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_vectors_are_those_of_the_model(client, llm, encoding):
    answer = embed(client, **encoding)
    assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == "demo"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(llm.tokenizer.encode(t)) for t in TEXTS)
    for text, each in zip(TEXTS, answer.data, strict=True):
        vector = each.embedding
        if encoding.get("encoding_format") == "base64":
            import base64

            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_allclose(vector, llm.embed(text), rtol=1e-5, atol=1e-6)


def test_pooling_and_length(client, llm):
    answer = embed(client, input="import os", extra_body={"pooling": "last", "normalize": False})
    expected = llm.embed("import os", pooling="last", normalize=False)
    np.testing.assert_allclose(answer.data[0].embedding, expected, rtol=1e-4, atol=1e-5)
    assert np.linalg.norm(embed(client, input="import os").data[0].embedding) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("wrong", "says"), [
    ("word " * 600, "the prompt does not fit the context"),
    ([-1], "prompt: token 0: expected an id in"),
])  # fmt: skip
def test_a_wrong_text_of_many_is_named(demo, wrong, says):
    answer = httpx.post(f"{demo.url}/v1/embeddings", json={"input": ["a", "b", wrong]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "input[2]"
    assert error["message"].startswith(f"input[2]: {says.removeprefix('prompt: ')}")
    alone = httpx.post(f"{demo.url}/v1/embeddings", json={"input": wrong}).json()["error"]
    assert alone["message"].startswith(says.replace("prompt: ", "input: ")) and alone["code"] == error["code"]


def test_token_ids_and_their_text_are_alike(client, llm):
    ids = llm.tokenizer.encode(TEXTS[1])
    vectors = [embed(client, input=given).data[0].embedding for given in (TEXTS[1], ids, [ids])]
    assert vectors[0] == vectors[1] == vectors[2]


def test_more_texts_than_slots_beside_a_stream(demo, client):
    """More texts than slots beside another answer: every vector equals the one got alone, and the answer is
    complete."""
    alone = {text: embed(client, input=text).data[0].embedding for text in TEXTS}
    found = []
    stream = threading.Thread(target=lambda: found.append(demo.client.post("/v1/completions", json={
        "prompt": "x", "max_tokens": 40, "ignore_eos": True,
    }).json()["usage"]["completion_tokens"]))  # fmt: skip
    stream.start()
    many = embed(client, input=TEXTS * 7)
    stream.join()
    assert [each.embedding for each in many.data] == [alone[text] for text in TEXTS * 7] and found == [40]
    demo.wait_idle()
    assert len(demo.engine.llm.engine.slots.free) == 4


@pytest.mark.parametrize(("fields", "error", "param"), [
    ({"model": "ada"}, openai.NotFoundError, "model"),
    ({"input": []}, openai.BadRequestError, "input"),
    ({"input": ["x"] * 2049}, openai.BadRequestError, "input"),
    ({"input": [{"text": "x"}]}, openai.BadRequestError, "input[0]"),
    ({"input": [5] * 600}, openai.BadRequestError, None),
    ({"input": [5, 99999]}, openai.BadRequestError, "input"),
    ({"encoding_format": "int8"}, openai.BadRequestError, "encoding_format"),
    ({"dimensions": 3}, openai.BadRequestError, "dimensions"),
    ({"extra_body": {"pooling": "first"}}, openai.BadRequestError, "pooling"),
    ({"extra_body": {"truncate_prompt_tokens": 2}}, openai.BadRequestError, "truncate_prompt_tokens"),
    ({"extra_body": {"add_special_tokens": False}}, openai.BadRequestError, "add_special_tokens"),
])  # fmt: skip
def test_what_is_refused_names_the_field(client, fields, error, param):
    with pytest.raises(error) as caught:
        embed(client, **fields)
    assert caught.value.param == param


def test_a_client_that_leaves_during_the_last_texts_gets_no_answer(llm):
    service = SimpleNamespace(engine=SimpleNamespace(llm=llm), settings=ServerSettings("demo"))
    work = Embeddings(service, {"input": TEXTS[0]})
    (reading,) = work._readings
    read = reading.work

    def left(slot, block_table):
        work.cancel()
        return (yield from read(slot, block_table))

    reading.work = left
    work.run()
    assert work.answer == ()


def test_a_client_that_leaves_while_its_texts_are_about_to_be_submitted_occupies_nothing(llm):
    service = SimpleNamespace(engine=SimpleNamespace(llm=llm), settings=ServerSettings("demo"))
    work = Embeddings(service, {"input": TEXTS[0]})
    work.cancel()
    (reading,) = work._readings
    work.run()
    assert work.answer == () and reading.result is None
    llm.shared.cancel([reading])
    llm.shared.run([reading])
    assert reading.result is None
