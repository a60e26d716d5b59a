"""The server as a process: signals while it loads, a lost device, a log that nobody reads, few file descriptors."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from serving import reserved_port

TESTS = Path(__file__).resolve().parents[1]
ASK = {"messages": [{"role": "user", "content": "hi"}]}


class Process:
    """A server process. `lines` has the lines of its log read so far."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self.url = next(word for word in self.line().split() if word.startswith("http")).strip(";")

    def line(self):
        line = self.process.stderr.readline()
        assert line, f"it has ended: {self.lines}"
        self.lines.append(line)
        return line

    def wait_ready(self):
        while " ready: " not in self.line():
            pass

    def rest(self):
        """Read the log to its end, and return all lines."""
        self.lines += self.process.stderr.readlines()
        return self.lines


@contextmanager
def launched(kind, folder, *arguments, num_files=None):
    def limit():
        if num_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, str(TESTS / "serve_process.py"), kind, str(folder), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=limit)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@contextmanager
def started(kind, folder, *arguments, num_files=None):
    with launched(kind, folder, *arguments, num_files=num_files) as process:
        yield Process(process)


def is_healthy(client):
    """Return whether the server answers and its model is there; False if it does not listen yet."""
    try:
        return client.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_model_is_loaded_ends_the_process_at_once(tmp_path, number, code):
    with started("slow", tmp_path) as server:
        while httpx.get(f"{server.url}/health/live").status_code != 200:
            time.sleep(0.01)
        server.process.send_signal(number)
        assert server.process.wait(30) == code
        assert not any("Traceback" in line or "rror" in line for line in server.rest())


def test_a_lost_device_ends_the_process_with_an_error(tmp_path):
    with started("lost", tmp_path) as server:
        server.wait_ready()
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=ASK)
        assert answer.status_code == 503 and "the GPU is gone" in answer.json()["error"]["message"]
        assert server.process.wait(30) == 1
        lines = server.rest()
        assert "the GPU is gone" in lines[-1] and not any("Traceback" in line for line in lines)


def test_a_quiet_server_says_nothing_but_errors(tmp_path):
    with reserved_port() as port, launched("lost", tmp_path, "--quiet", "--port", str(port)) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            while not is_healthy(client):
                assert process.poll() is None
                time.sleep(0.01)
            assert client.post("/v1/chat/completions", json=ASK).status_code == 503
        assert process.wait(30) == 1
        assert all("the GPU is gone" in line for line in process.stderr.readlines())


def test_a_log_that_nobody_reads_stops_nothing(tmp_path):
    with started("plain", tmp_path) as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=10) as client:
            for _ in range(2000):  # each has a line: more than a pipe holds
                assert client.get("/health").status_code == 200
            assert client.post("/v1/chat/completions", json=ASK).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


@pytest.mark.all
def test_idle_connections_leave_room_and_fill_no_log(tmp_path):
    with started("plain", tmp_path, num_files=200) as server:
        server.wait_ready()
        threading.Thread(target=server.rest).start()
        parts = urlsplit(server.url)
        idle = [socket.create_connection((parts.hostname, parts.port), timeout=10) for _ in range(400)]
        for _ in range(20):
            begun = time.monotonic()
            assert httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=10).status_code == 200
            assert time.monotonic() - begun < 5
        for connection in idle:
            connection.close()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    assert len(server.lines) < 60, server.lines[:60]


def test_when_all_connections_are_busy_others_are_told_to_come_again(tmp_path):
    with started("endless", tmp_path, "--max-queue", "1000", num_files=150) as server:
        server.wait_ready()
        parts, streams, refused = urlsplit(server.url), [], 0
        content = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for _ in range(100):
            stream = socket.create_connection((parts.hostname, parts.port), timeout=10)
            stream.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            streams.append(stream)
        for stream in streams:
            try:
                refused += stream.recv(12) == b"HTTP/1.1 503"
            except ConnectionResetError:  # closed before all that it had sent was read
                refused += 1
        assert 0 < refused < 100
        for stream in streams:
            stream.close()
        while httpx.get(f"{server.url}/health/live").status_code != 200:
            time.sleep(0.01)
