"""A real nginx with the shipped configuration in front of two servers."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("starlette")

from serving import saying_llm, serving

import cpmrt

CONFIGURATION = Path(cpmrt.__file__).parent / "deploy" / "nginx.conf"
CHAT = "/v1/chat/completions"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def servers(tmp_path):
    """Two servers that answer with their names and then digits."""
    settings = {"delay_s": 0.01}
    with (
        serving(lambda: saying_llm(tmp_path / "a", lambda _: "A0123456789", **settings), **NAMED) as first,
        serving(lambda: saying_llm(tmp_path / "b", lambda _: "B0123456789", **settings), **NAMED) as second,
    ):
        yield first, second


NAMED = {"model_name": "demo", "allowed_hosts": ("cpmrt",)}


@pytest.fixture
def proxy(servers, tmp_path):
    """The address of nginx in front of them."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("needs nginx")
    text, port = CONFIGURATION.read_text(), free_port()
    for number, server in enumerate(servers, 8001):
        text = text.replace(f"127.0.0.1:{number} ", server.url.removeprefix("http://") + " ")
    text = text.replace("listen 8000;", f"listen 127.0.0.1:{port};")
    temporary = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in
                        ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))  # fmt: skip
    text = text.replace("http {\n", f"http {{\n{temporary}access_log off;\n", 1)
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\n{text}")
    command = [program, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 20
        while True:
            assert process.poll() is None, process.stderr.read().decode()
            try:
                assert httpx.get(url + "/health").status_code == 200
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def who(url, text, headers=None, **extra) -> str:
    """Return the name of the server that answers."""
    body = {"messages": [{"role": "user", "content": text}]} | extra
    answer = httpx.post(url + CHAT, json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"][0]


def test_prompts_that_begin_alike_go_to_one_server(proxy):
    begins = [f"{number}: " + "import os " * 110 for number in range(12)]
    first = [who(proxy, text, max_tokens=1) for text in begins]
    assert {"A", "B"} == set(first), "different ones are spread"
    for turn in range(2):
        again = [who(proxy, f"{text} and more {turn}", temperature=0.5, max_tokens=1) for text in begins]
        assert again == first


def test_a_session_stays_with_its_server(proxy):
    found = {session: {who(proxy, str(number), {"X-Session-Id": session}, max_tokens=1) for number in range(3)}
             for session in "abcdefghij"}  # fmt: skip
    assert all(len(servers) == 1 for servers in found.values())
    assert {"A", "B"} == set().union(*found.values())


def test_a_stream_comes_while_it_is_written(proxy):
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with httpx.stream("POST", proxy + CHAT, json=body, timeout=30) as stream:
        times = [time.monotonic() for line in stream.iter_lines() if line.startswith("data: {")]
    assert len(times) > 10 and times[-1] - times[1] > 0.05, "eleven tokens, ten milliseconds each"


def test_a_large_body_is_looked_at_and_passed_on(proxy):
    body = {"prompt": "x" * 3000, "max_tokens": 1, "unknown": "y" * 500_000}
    assert httpx.post(proxy + "/v1/completions", json=body, timeout=30).status_code == 200


def test_when_a_server_ends_the_other_one_answers(proxy, servers):
    texts = [f"{number}: " + "import re " * 110 for number in range(8)]
    before = [who(proxy, text, max_tokens=1) for text in texts]
    assert {"A", "B"} == set(before)
    servers[1].running.stop()
    deadline = time.monotonic() + 20
    while servers[1].engine.state != "draining":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [who(proxy, text, max_tokens=1) for text in texts] == ["A"] * 8


def test_the_advice_on_host_names_is_right(proxy, servers):
    """The advised --allowed-host is the upstream's name, which nginx sends as the Host; other hosts are refused."""
    name = re.search(r"--allowed-host (\w+)", CONFIGURATION.read_text())[1]
    assert (name,) == NAMED["allowed_hosts"]
    refused = httpx.get(servers[0].url + "/health", headers={"Host": "elsewhere"})
    assert refused.status_code == 403 and json.loads(refused.text)["error"]["code"] == "wrong_host"
