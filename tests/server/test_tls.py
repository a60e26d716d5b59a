"""Connections with TLS have the limits of the others from their first byte on."""

from __future__ import annotations

import os
import socket
import ssl
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from serving import saying_llm, serving

from cpmrt.server import run, tls
from cpmrt.server.connections import Connections

LIMIT = 8


@pytest.fixture
def server(tmp_path, certificate, monkeypatch):
    """A server of a few connections, which are in `server.connections`."""
    connections = Connections(LIMIT)
    monkeypatch.setattr(run, "Connections", lambda limit: connections)
    cert, key = certificate
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "ok"), ssl_certfile=cert, ssl_keyfile=key) as server:
        server.client.close()
        until(lambda: not connections._count)
        server.connections = connections
        yield server
        until(lambda: not connections._count)


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connect(server):
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def check_answers(server):
    begun = time.monotonic()
    assert httpx.get(server.url + "/health", verify=False, timeout=10).status_code == 200
    assert time.monotonic() - begun < 3


def num_files():
    return len(os.listdir("/proc/self/fd"))


def test_connections_that_never_begin_their_handshake_make_room(server):
    before = num_files()
    with ExitStack() as stack:
        for _ in range(5 * LIMIT):
            stack.enter_context(connect(server))
        check_answers(server)
        until(lambda: num_files() <= before + 5 * LIMIT + LIMIT)
        assert server.connections._count <= LIMIT


def test_idle_clients_that_never_answer_make_room_at_once(server):
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    with ExitStack() as stack:
        for _ in range(3 * LIMIT):
            stack.enter_context(trust.wrap_socket(connect(server)))
        until(lambda: server.connections._count == LIMIT)
        check_answers(server)


def test_a_handshake_has_little_time(server, monkeypatch):
    monkeypatch.setattr(tls, "HEAD_TIMEOUT_S", 0.3)
    with connect(server) as silent, connect(server) as slow:
        slow.sendall(b"\x16\x03\x01")
        assert silent.recv(1) == slow.recv(1) == b""
    until(lambda: not server.connections._count)


def test_a_handshake_that_fails_frees_its_place(server):
    for _ in range(2 * LIMIT):
        with connect(server) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    until(lambda: not server.connections._count)
    check_answers(server)
