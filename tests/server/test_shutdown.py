"""Shutdown of a server: it drains, and ends whatever still runs or waits when its time of grace is over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from threading import Event
from urllib.parse import urlsplit

import httpx
import pytest
from serving import saying_llm, serving
from timing import until

from cpmrt import RequestError
from cpmrt.server.service import Service

CHAT = "/v1/chat/completions"


def body(**fields):
    return {"messages": [{"role": "user", "content": "hi"}]} | fields


def endless(folder, delay_s):
    """Return a model whose answer has 3,000 tokens, one per step."""
    return saying_llm(folder, lambda prompt: "0123456789" * 300, delay_s=delay_s)


def sent(url, path, content, length=None):
    """Return a connection that has sent a request, or the beginning of one of length `length`, and read nothing."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=20)
    data = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {length or len(data)}\r\n\r\n".encode() + data)
    return connection


def received(connection):
    """Return everything that comes until the server closes the connection."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_draining_lets_streams_finish_and_takes_no_more(tmp_path):
    with serving(lambda: endless(tmp_path, delay_s=0.0003), grace=60) as server:
        with server.client.stream("POST", CHAT, json=body(stream=True, max_tokens=900)) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.running.stop()
            until(lambda: server.engine.state == "draining")
            with pytest.raises(httpx.TransportError):
                until(lambda: httpx.get(server.url + "/health").status_code == 0)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert sum('"content"' in line for line in rest) >= 890


def test_the_time_of_grace_ends(tmp_path):
    with serving(lambda: endless(tmp_path, delay_s=0.01), grace=0.2) as server:
        stream = sent(server.url, CHAT, body(stream=True))
        until(lambda: server.engine.open_jobs)
        begun = time.monotonic()
        server.running.stop()
        assert b"shutting down" in received(stream) and time.monotonic() - begun < 10


@pytest.mark.parametrize("ends_at_once", [False, True], ids=["grace", "second SIGINT"])
def test_a_request_that_is_still_prepared_ends_with_a_503(tmp_path, monkeypatch, ends_at_once):
    begun, released = Event(), Event()

    def preparing(self, body):
        begun.set()
        released.wait(20)
        raise RequestError("prepared")

    monkeypatch.setattr(Service, "prepare_chat", preparing)
    with serving(lambda: endless(tmp_path, delay_s=0.01), grace=60 if ends_at_once else 0.2) as server:
        connection = sent(server.url, CHAT, body())
        assert begun.wait(20)
        running = server.running
        if ends_at_once:
            for _ in range(2):
                running._loop.call_soon_threadsafe(running._server.handle_exit, signal.SIGINT, None)
        else:
            running.stop()
        answer = received(connection)
        released.set()
    assert answer.startswith(b"HTTP/1.1 503") and b'"code":"unavailable"' in answer, answer[:300]


@contextmanager
def process(*arguments):
    """Yield a server process of the bundled model and its address; the process is killed at the end."""
    command = [sys.executable, "-m", "cpmrt", "serve", "--executor", "reference", "--port", "0", *arguments]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        line = next(line for line in running.stderr if " ready: " in line)
        yield running, line.split(" at ")[-1].strip()
    finally:
        running.kill()
        running.communicate()


WORK = {
    "half a body": (CHAT, body(), 10_000),
    "embeddings": ("/v1/embeddings", {"input": ["hello world " * 40] * 1000}, None),
    "scores": ("/v1/completions", {"prompt": ["hello world " * 600] * 60, "echo": True, "logprobs": 1,
                                   "max_tokens": 0}, None),
}  # fmt: skip


@pytest.mark.parametrize("what", WORK)
def test_the_time_of_grace_ends_for_all_work(what):
    """The time of grace ends all work with a 503; one signal begins that time, and a second SIGINT ends it."""
    path, content, length = WORK[what]
    for grace, numbers in (("0.5", [signal.SIGTERM]), ("60", [signal.SIGINT, signal.SIGINT])):
        with process("--grace", grace) as (running, url):
            connection = sent(url, path, content, length)
            time.sleep(0.5)
            begun = time.monotonic()
            for number in numbers:
                running.send_signal(number)
                time.sleep(0.2)
            answer = received(connection)
            assert time.monotonic() - begun < 10
            assert running.wait(60) == (0 if grace == "0.5" else 130)
            assert answer.startswith(b"HTTP/1.1 503") and b'"code":"unavailable"' in answer, answer[:300]
            assert "Traceback" not in running.stderr.read()
