"""Requests that offer to go on in another protocol are answered in HTTP/1.1, and their bodies are read."""

from __future__ import annotations

import json
import socket
import time
from itertools import pairwise
from urllib.parse import urlsplit

import pytest

UPGRADES = {
    "h2c": "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQ\r\n",
    "websocket": "connection: upgrade\r\nupgrade: websocket\r\n",
    "two headers": "Upgrade: TLS/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
}
BODY = json.dumps({"messages": [{"role": "user", "content": "say(fine)yas"}]}, indent=1).encode()
PLAIN_LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def request(upgrade=UPGRADES["h2c"], *, is_chunked=False):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{upgrade}content-type: application/json\r\n"
    if not is_chunked:
        return f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:20], BODY[20:]))
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


def statuses(server, *segments):
    """Send these bytes one after another, and return the statuses of all answers until the server closes."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for segment in segments:
            connection.sendall(segment)
            time.sleep(0.02 if len(segments) < 10 else 0.001)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]], answer


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
def test_the_body_is_read_in_one_segment_or_several(says, upgrade, is_chunked):
    data = request(upgrade, is_chunked=is_chunked)
    head_end = data.index(b"\r\n\r\n") + 4
    everywhere, between, elsewhere = range(1, len(data)), (head_end,), (40, head_end + 9)
    for cuts in ((), between, elsewhere, everywhere):
        segments = [data[start:end] for start, end in pairwise((0, *cuts, len(data)))]
        found, answer = statuses(says, *segments, PLAIN_LAST)
        assert found == [200, 200] and b'"content":"fine"' in answer


@pytest.mark.parametrize("segment_bytes", [10**6, 100])
def test_pipelined_requests(says, segment_bytes):
    data = request() + request(is_chunked=True) + request("") + request(UPGRADES["websocket"]) + PLAIN_LAST
    segments = [data[at : at + segment_bytes] for at in range(0, len(data), segment_bytes)]
    found, answer = statuses(says, *segments)
    assert found == [200] * 5 and answer.count(b'"content":"fine"') == 4


def test_the_connection_closes_where_the_request_says_so(says):
    found, answer = statuses(says, request("connection: close, upgrade\r\nupgrade: h2c\r\n"))
    assert found == [200] and b"connection: close" in answer and b'"content":"fine"' in answer


def test_a_head_that_is_too_long_is_refused_as_any_other(says):
    found, _ = statuses(says, request()[: -len(BODY) - 4] + b"\r\n" + b"a: b\r\n" * 12_000)
    assert found == [431]


def test_faults_behind_an_upgrade_are_found(says):
    assert statuses(says, request().replace(b"content-length: ", b"content-length: x"))[0] == [400]
    assert statuses(says, request(is_chunked=True)[:-5] + b"zz\r\n")[0] == [400]
    connect = b"CONNECT / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert statuses(says, request() + connect)[0] == [200, 405]
