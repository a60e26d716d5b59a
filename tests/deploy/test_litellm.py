"""LiteLLM's client against a server, and its proxy with the shipped configuration in front of two."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("litellm")
pytest.importorskip("starlette")

import litellm
from serving import TOOL_CALLS, saying_llm, serving

import cpmrt

CONFIGURATION = Path(cpmrt.__file__).parent / "deploy" / "litellm.yaml"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
KEY = "sk-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

pytestmark = pytest.mark.all


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": f"say({text})yas"}]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers that take the key and begin their answers with their names."""
    folder = tmp_path_factory.mktemp("servers")

    def said(prompt):
        return prompt.rpartition("say(")[2].partition(")yas")[0]

    def saying(name):
        return lambda: saying_llm(folder / name, lambda prompt: name + said(prompt), delay_s=0.02)

    with (
        serving(saying("A"), model_name="cpmrt", api_keys=("sesame",)) as first,
        serving(saying("B"), model_name="cpmrt", api_keys=("sesame",)) as second,
    ):
        yield first, second


def complete(server, **fields):
    return litellm.completion(model="openai/cpmrt", api_base=server.url + "/v1", api_key="sesame", **fields)


def test_the_client_plain_streaming_and_with_tools(servers):
    server = servers[0]
    answer = complete(server, messages=say("hello"))
    assert answer.choices[0].message.content == "Ahello" and answer.usage.completion_tokens == 7
    chunks = complete(server, messages=say("hello"), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Ahello"
    choice = complete(server, messages=say(TOOL_CALLS["hermes"]), tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "weather"
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(server, messages=say("x"), temperature=-1)
    with pytest.raises(litellm.BadRequestError, match="wrong API key"):  # LiteLLM turns OpenAI's 401 into this too
        litellm.completion(model="openai/cpmrt", api_base=server.url + "/v1", api_key="wrong", messages=say("x"))


@pytest.fixture(scope="module")
def proxy(servers, tmp_path_factory):
    """The address of a running LiteLLM proxy in front of the two servers."""
    program = shutil.which("litellm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs the litellm program (pip install 'litellm[proxy]')")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    addresses = {f"CPMRT_URL_{number}": f"{server.url}/v1" for number, server in enumerate(servers, 1)}
    command = [program, "--config", str(CONFIGURATION), "--host", "127.0.0.1", "--port", str(port)]
    keys = {"CPMRT_API_KEY": "sesame", "LITELLM_MASTER_KEY": KEY}
    environment = {**os.environ, **addresses, **keys, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    log = tmp_path_factory.mktemp("proxy") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx.get(url + "/health/liveliness", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def ask(url, text, **fields):
    body = {"model": "cpmrt", "messages": say(text)} | fields
    return httpx.post(url + "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


def said_at_once(url, count):
    """Return the set of answers to `count` simultaneous requests."""
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda _: ask(url, "hi").json(), range(count)))
    return {answer["choices"][0]["message"]["content"] for answer in answers}


def test_the_proxy_spreads_requests_and_goes_on_without_a_server(proxy, servers):
    assert said_at_once(proxy, 12) == {"Ahi", "Bhi"}
    stream = ask(proxy, "hello", stream=True).text
    assert stream.count('"content":"') >= 5 and stream.rstrip().endswith("data: [DONE]")
    assert ask(proxy, "x", temperature=-1).status_code == 400
    servers[1].running.stop()
    time.sleep(0.5)
    assert said_at_once(proxy, 8) == {"Ahi"}
