"""The limit on connections: the idle ones that make room for new ones, and clients that vanish."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from serving import saying_llm, serving

from cpmrt.server.connections import BACKLOG, MAX_CONNECTIONS, Connections, connection_limit


class Fake:
    def __init__(self, connections):
        self.connections, self.end = connections, None

    def leave(self):
        self.end = "left"
        self.connections.close(self)

    def refuse(self):
        self.end = "refused"
        self.connections.close(self)


def test_the_longest_idle_connection_makes_room():
    connections = Connections(3)
    a, b, c, d, e = (Fake(connections) for _ in range(5))
    for each in (a, b, c):
        connections.open(each)
    connections.begin_request(a)
    connections.open(d)
    assert [each.end for each in (a, b, c, d)] == [None, "left", None, None]
    connections.end_request(a)
    connections.begin_request(d)
    connections.open(e)
    assert [each.end for each in (a, c, d, e)] == [None, "left", None, None], "a was busy later than c came"


def test_without_an_idle_one_a_new_connection_is_refused():
    connections = Connections(2)
    a, b, c, d = (Fake(connections) for _ in range(4))
    for each in (a, b):
        connections.open(each)
        connections.begin_request(each)
    connections.open(c)
    assert c.end == "refused" and a.end is b.end is None
    connections.close(a)
    connections.open(d)
    assert d.end is None


def test_the_limit_leaves_files_for_the_process(monkeypatch):
    for allowed in (100, 200, 1024, 10**6):
        monkeypatch.setattr(resource, "getrlimit", lambda which, allowed=allowed: (allowed, allowed))
        limit = connection_limit()
        assert 8 <= limit <= MAX_CONNECTIONS
        assert limit == 8 or limit + BACKLOG + len(os.listdir("/proc/self/fd")) < allowed or limit == MAX_CONNECTIONS


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endless")
    with serving(lambda: saying_llm(folder, lambda prompt: "0123456789" * 300, delay_s=0.01)) as server:
        yield server


def connect(server):
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def test_the_kernel_looks_after_silent_clients(endless):
    with connect(endless):
        state = endless.running._server.server_state
        while not state.connections:
            time.sleep(0.01)
        for protocol in list(state.connections):
            peer = protocol.transport.get_extra_info("socket")
            assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            probes = [peer.getsockopt(socket.IPPROTO_TCP, option) for option in (
                socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]  # fmt: skip
            assert probes[0] + probes[1] * probes[2] <= 60


def request(path="/v1/chat/completions", method="POST", version="1.1", **fields):
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    content = json.dumps(body).encode() if method == "POST" else b""
    head = f"{method} {path} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("followed_by", [b"", request("/health", "GET"), request() * 3, b"POST /v1/chat"],
                         ids=["nothing", "a request", "requests", "a part of one"])  # fmt: skip
def test_a_client_that_vanishes_frees_its_slot_whatever_it_has_sent(endless, followed_by):
    with connect(endless) as connection:
        connection.sendall(request())
        while not any(job.sequence.token_ids for job in endless.engine.open_jobs):
            time.sleep(0.005)
        connection.sendall(followed_by)
        time.sleep(0.1)
        assert len(endless.engine.open_jobs) == 1
    endless.wait_idle(10)


def test_endless_pipelines_are_cut_off(endless):
    with connect(endless) as connection:
        connection.sendall(request() + request("/health", "GET") * 40)
        with suppress(ConnectionError):
            assert connection.recv(1000) == b""
    endless.wait_idle(10)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_of_http_1_0_get_no_chunks(says, stream):
    with connect(says) as connection:
        connection.sendall(request(version="1.0", stream=stream, max_tokens=3))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    if stream:
        events = content.decode().split("\n\n")
        assert all(event.startswith("data: ") for event in events[:-1]) and events[-2:] == ["data: [DONE]", ""]
    else:
        assert f"content-length: {len(content)}".encode() in head.lower() and json.loads(content)["choices"]
