"""Answers relayed through another process, which must be those of the server itself."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

pytest.importorskip("starlette")

from serving import saying_llm

from cpmrt.deploy.relay import Head, RoutedRequest, relay
from cpmrt.server.app import make_app
from cpmrt.server.service import ServerSettings, Service

JSON = [(b"content-type", b"application/json"), (b"host", b"localhost")]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def routed(path="/v1/chat/completions", body=None, method="POST"):
    content = json.dumps(CHAT if body is None else body).encode()
    return RoutedRequest(method, path, b"", JSON, content, ("127.0.0.1", 5))


def serve(folder, use, reply="0123456789", **settings):
    """Start a service, return what `use(app, service)` returns, and stop it."""

    async def run():
        service = Service(ServerSettings("demo"), lambda: saying_llm(folder, lambda prompt: reply, **settings))
        await service.engine.loaded
        try:
            return await use(make_app(service), service)
        finally:
            await service.engine.stop(5.0)
            service.close()

    return asyncio.run(run())


async def collect(app, request):
    head, *body = [part async for part in relay(app, request)]
    assert isinstance(head, Head)
    return head.status, b"".join(body).decode()


def test_whole_answers_streams_and_errors(tmp_path):
    async def use(app, service):
        return [
            await collect(app, routed(body=CHAT | extra)) for extra in ({}, {"stream": True}, {"temperature": -1})
        ] + [await collect(app, routed("/health", method="GET"))]

    whole, stream, refused, health = serve(tmp_path, use)
    assert whole[0] == 200 and json.loads(whole[1])["choices"][0]["message"]["content"] == "0123456789"
    events = [json.loads(line[6:]) for line in stream[1].splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "0123456789"
    assert refused[0] == 400 and json.loads(refused[1])["error"]["param"] == "temperature"
    assert health[0] == 200


def test_a_stream_comes_while_it_is_written(tmp_path):
    async def use(app, service):
        parts = [part async for part in relay(app, routed(body=CHAT | {"stream": True}))]
        return len(parts)

    assert serve(tmp_path, use, delay_s=0.01) > 5


def test_leaving_frees_the_slot(tmp_path):
    async def use(app, service):
        parts = relay(app, routed(body=CHAT | {"stream": True}))
        while isinstance(await anext(parts), Head):
            pass
        assert service.engine.open_jobs
        await parts.aclose()
        until = time.monotonic() + 10  # all of the answer would take longer
        while service.engine.open_jobs and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return service.engine.open_jobs

    assert serve(tmp_path, use, reply="x" * 3000, delay_s=0.005) == ()


def test_an_application_that_fails_raises():
    async def broken(scope, receive, send):
        raise RuntimeError("a bug")

    async def use():
        return [part async for part in relay(broken, routed())]

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(use())


@pytest.mark.parametrize(("body", "prompt"), [
    ({"model": "m", "messages": [1]}, b'"messages": [1]}'),
    ({"temperature": 0, "prompt": "x"}, b'"prompt": "x"}'),
    ({"tokens": [1]}, b""),
])  # fmt: skip
def test_the_prompt_of_a_request(body, prompt):
    assert routed(body=body).prompt == prompt


def test_turns_of_a_chat_have_prompts_that_begin_alike():
    first = [{"role": "user", "content": "x" * 2000}]
    more = [*first, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    prompts = [routed(body={"messages": turns, "max_tokens": n}).prompt for n, turns in enumerate((first, more))]
    assert prompts[0][:2000] == prompts[1][:2000]
    assert len(routed(body={"prompt": "x" * 10**6}).prompt) == 16 * 1024
