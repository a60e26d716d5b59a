"""Small streamed requests beside hostile ones: they are hardly slower, all are equal, and memory stays flat.

CPMRT_LOAD_SECONDS=20, as `tools/dev.py test --all` sets it, has 64 clients; CPMRT_LOAD_SECONDS=600 is the long form.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

TESTS = Path(__file__).resolve().parents[1]
SECONDS = float(os.environ.get("CPMRT_LOAD_SECONDS", "12"))
CLIENTS, ATTACKERS, SLOW_READERS = (64, 8, 4) if SECONDS >= 20 else (8, 4, 1)
ROUND_S = min(max(SECONDS, 20), 30)
"""Seconds of one round of load, a third of them without hostile requests, so that both parts meet the same machine."""
SLOWER_AT_MOST = 3
GROWN_KIB = 10 * 1024
TRIES = 3
TEXT = "the quick brown fox "
LONG_TEXT = TEXT * 50


def chat(**fields):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **fields}


SMALL, LONG = chat(stream=True), chat(stream=True, max_tokens=4000)
HOSTILE = [
    ("/v1/completions", {"prompt": "word " * 190_000}),
    ("/v1/completions", {"prompt": [7] * 300_000}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 25_000}),
    ("/tokenize", {"prompt": "word " * 60_000}),
    chat(stop=["a" * length for length in range(1, 180)]),
    chat(stop=["x" * 60_000] * 16),
    chat(logprobs=True, top_logprobs=20, max_tokens=100),
    chat(logit_bias={str(index): 1 for index in range(60_000)}),
    chat(whatever=[{"a": index} for index in range(60_000)]),
    ("/v1/chat/completions", b"[" * 900_000),
    ("/v1/chat/completions", b'{"messages": "' + b"\\n" * 400_000),
]


class Load:
    """Clients of one server. `seconds` has the time of each small request, `texts` the answers they got."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self.seconds: list[float] = []
        self.texts: set[str] = set()
        self.long_texts: set[str] = set()
        self.num_hostile = 0
        self._requests = [self._encoded(path, body) for path, body in HOSTILE]
        self._small, self._long = self._encoded(*SMALL), self._encoded(*LONG)

    def _encoded(self, path, body):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content

    async def small(self, until: float, rng: random.Random) -> None:
        while time.monotonic() < until:
            begun = time.monotonic()
            answer = await self._ask(self._small, leaves=rng.random() < 0.1)
            if answer is not None:
                self.texts.add(text_of(answer))
                self.seconds.append(time.monotonic() - begun)
            await asyncio.sleep(0.05)

    async def slow(self, until: float, rng: random.Random) -> None:
        """Read long answers much slower than they come; leave some of them before their end."""
        while time.monotonic() < until:
            reader, writer = await asyncio.open_connection(*self._address, limit=2048)
            writer.write(self._long)
            answer, most = bytearray(), 10**9 if rng.random() < 0.7 else 100_000
            while len(answer) < most and (part := await reader.read(4096)):
                answer += part
                await asyncio.sleep(0.05)
            if len(answer) < most:
                self.long_texts.add(text_of(bytes(answer)))
            writer.transport.abort()

    async def hostile(self, until: float, rng: random.Random) -> None:
        while time.monotonic() < until:
            await self._ask(rng.choice(self._requests), leaves=rng.random() < 0.3)
            self.num_hostile += 1

    async def each_hostile_one(self) -> None:
        for request in self._requests:
            await self._ask(request, leaves=False)

    async def _ask(self, request: bytes, *, leaves: bool) -> bytes | None:
        """Send a request and return all of its answer, or None if the client left before its end."""
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(request)
            if leaves:
                await asyncio.sleep(0.01)
                writer.transport.abort()
                return None
            return await reader.read()
        except ConnectionError:  # a body past the limit is not read to its end
            return None
        finally:
            writer.close()


def text_of(answer: bytes) -> str:
    """Return the text of an answer that was read to its end, whose HTTP chunks end where its events do."""
    lines = answer.decode().splitlines()
    assert "data: [DONE]" in lines
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


async def measured(url: str, seconds: float, *, attacked: bool) -> Load:
    load, until = Load(url), time.monotonic() + seconds
    running = [load.small(until, random.Random(number)) for number in range(CLIENTS)]
    if attacked:
        running += [load.hostile(until, random.Random(number)) for number in range(ATTACKERS)]
        running += [load.slow(until, random.Random(number)) for number in range(SLOW_READERS)]
    await asyncio.gather(*running)
    return load


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


@pytest.fixture
def child(tmp_path):
    """A server process, whose address is `child.url`."""
    command = [sys.executable, str(TESTS / "serve_scripted.py"), str(tmp_path), "0.004"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        process.url = process.stdout.readline().strip()
        yield process
        process.stdin.close()
        assert process.wait(20) == 0


def resident_kib(process) -> int:
    """Return the least memory of a process within a second: requests that clients have just left may still run."""
    found = []
    for _ in range(10):
        time.sleep(0.1)
        status = Path(f"/proc/{process.pid}/status").read_text()
        found.append(int(status.partition("VmRSS:")[2].split()[0]))
    return min(found)


def test_answers_beside_hostile_requests_are_those_got_alone(child):
    load = asyncio.run(measured(child.url, 2, attacked=True))
    assert load.texts == {TEXT} and len(load.seconds) > 5 and load.num_hostile > 0
    assert load.long_texts <= {LONG_TEXT}


@pytest.mark.all
@pytest.mark.alone
def test_hostile_requests_slow_small_ones_by_little_and_leave_no_memory_behind(child):
    asyncio.run(Load(child.url).each_hostile_one())
    asyncio.run(measured(child.url, ROUND_S, attacked=True))  # memory that is kept once is no growth
    kept, until = [resident_kib(child)], time.monotonic() + SECONDS
    while len(kept) < 2 or time.monotonic() < until:
        ratios: list[float] = []
        while len(ratios) < TRIES and min(ratios, default=SLOWER_AT_MOST + 1) > SLOWER_AT_MOST:
            alone = asyncio.run(measured(child.url, ROUND_S / 3, attacked=False))
            beside = asyncio.run(measured(child.url, 2 * ROUND_S / 3, attacked=True))
            assert len(alone.seconds) > 20 and len(beside.seconds) > 20 and beside.num_hostile > 3
            assert alone.texts == beside.texts == {TEXT} and beside.long_texts <= {LONG_TEXT}
            ratios.append(p99(beside.seconds) / p99(alone.seconds))
            kept.append(resident_kib(child))
            print(f"{len(alone.seconds)} and {len(beside.seconds)} small ones: p99 {p99(alone.seconds):.3f} s alone, "
                  f"{p99(beside.seconds):.3f} s beside {beside.num_hostile} hostile ones; {kept[-1]} KiB")  # fmt: skip
        assert min(ratios) <= SLOWER_AT_MOST
    middle = len(kept) // 2
    assert max(kept) - kept[0] <= GROWN_KIB and min(kept[middle:]) - min(kept[:middle]) <= GROWN_KIB, kept
