"""Connections with TLS, which have the limits of other connections from their first byte on."""

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
from timing import until

from cpmrt.server import run, tls
from cpmrt.server.connections import Connections
from cpmrt.server.http_protocol import HEAD_TIMEOUT_S, LimitedHttpProtocol

LIMIT = 8
GRACE_S = 10.0
"""How long a server that ends would wait for clients if it did."""


@pytest.fixture
def server(tmp_path, certificate, monkeypatch):
    """A TLS server that takes `LIMIT` connections, which are in `server.connections`."""
    connections = Connections(LIMIT)
    monkeypatch.setattr(run, "Connections", lambda limit: connections)
    cert, key = certificate
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "ok"), ssl_certfile=cert, ssl_keyfile=key) as server:
        server.client.close()
        until(lambda: not connections._count)
        server.connections = connections
        yield server
        until(lambda: not connections._count)


def connect(server, receives=None):
    """Return a connection whose kernel buffers `receives` bytes to be read, or its default."""
    parts = urlsplit(server.url)
    connection = socket.socket()
    connection.settimeout(10)
    if receives:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    connection.connect((parts.hostname, parts.port))
    return connection


def trusting():
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def received(connection):
    """Return everything that comes until the server ends the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def check_answers(server):
    """Check that a new client is answered long before a silent one has to leave, after HEAD_TIMEOUT_S."""
    assert httpx.get(server.url + "/health", verify=False, timeout=0.8 * HEAD_TIMEOUT_S).status_code == 200


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


def test_an_answer_that_is_still_on_its_way_is_sent_to_its_end(server):
    """An answer complete for HTTP but still being sent by TLS is sent to its end, though its connection counts as
    idle."""
    request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with ExitStack() as stack:
        slow = stack.enter_context(trusting().wrap_socket(connect(server, receives=4096)))
        until(lambda: [type(each) for each in server.connections._idle] == [LimitedHttpProtocol])
        (protocol,) = server.connections._idle
        protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.sendall(request)
        until(lambda: protocol.carrier.get_write_buffer_size() and protocol in server.connections._idle)
        for _ in range(LIMIT):
            stack.enter_context(trusting().wrap_socket(connect(server)))
        until(lambda: protocol not in server.connections._idle)
        head, _, body = received(slow).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head.lower()


def test_a_server_that_ends_does_not_wait_for_idle_clients(tmp_path, certificate):
    cert, key = certificate
    with ExitStack() as stack:
        settings = {"ssl_certfile": cert, "ssl_keyfile": key, "grace": GRACE_S}
        with serving(lambda: saying_llm(tmp_path, lambda prompt: "ok"), **settings) as server:
            server.client.close()
            for _ in range(3):
                stack.enter_context(trusting().wrap_socket(connect(server)))
            check_answers(server)
            begun = time.monotonic()
        assert time.monotonic() - begun < 0.8 * GRACE_S


def test_idle_clients_that_never_answer_make_room_at_once(server):
    with ExitStack() as stack:
        for _ in range(3 * LIMIT):
            stack.enter_context(trusting().wrap_socket(connect(server)))
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
