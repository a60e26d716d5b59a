"""A server in a thread of the test process, and models whose answers a test decides."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM
from cpmrt.engine import Engine
from cpmrt.executor import Admit, ExecutorLimits, Prefill, Release, SlotResult, StepResult, TokenLogprobs
from cpmrt.server.run import Running, address_of, bind
from cpmrt.server.service import ServerSettings

TOOL_TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% endfor %}[assistant]{% if enable_thinking %}<think>\n{% endif %}"
)

TOOL_CALLS = {
    "hermes": 'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>',
    "minicpm4": 'Sure.\n<|tool_call_start|>\n```python\nweather("Köln", days=2)\n```\n<|tool_call_end|>\n',
    "minicpm5": 'Sure.\n<function name="weather"><param name="city">Köln</param><param name="days">2</param>'
    "</function>",
}
"""Answers with the same tool call in the formats of three families of models."""


class Server:
    """A running server with a client for it, and what tests ask of both."""

    def __init__(self, running: Running, url: str):
        self.running, self.url = running, url
        self.client = httpx.Client(base_url=url, timeout=120, verify=False)

    @property
    def engine(self):
        return self.running.service.engine

    def chat(self, text="hi", **fields):
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]} | fields)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def wait_idle(self, timeout_s: float = 30) -> None:
        """Wait until no job is open and every slot is free."""
        deadline = time.monotonic() + timeout_s
        engine = self.engine
        while engine.open_jobs or engine.llm.engine.running:
            assert time.monotonic() < deadline, "a slot leaks"
            time.sleep(0.005)


@contextmanager
def serving(load: Callable[[], LLM], **settings) -> Iterator[Server]:
    """Run a server on a free port until the block ends."""
    config = ServerSettings(**{"model_name": "demo", "port": 0, "grace": 2.0} | settings)
    listener = bind(config)
    running = Running(config, load, listener)
    failures = []

    def run() -> None:
        try:
            asyncio.run(running.run())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    server = Server(running, address_of(listener, config))
    try:
        deadline = time.monotonic() + 30
        while server.client.get("/health/ready").status_code != 200 and not failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield server
    finally:
        server.client.close()
        running.stop()
        thread.join(20)
    assert not failures and not thread.is_alive()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port of 127.0.0.1 at which one server can listen, and which no other program is given meanwhile.

    The socket that holds it does not listen, so that Linux lets another one with SO_REUSEADDR have its port too.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


_OTHERS = tuple((index, 1.0 - index) for index in range(3, 22))
"""Further tokens, after the one that is said, with falling log-probabilities."""


class Saying:
    """An executor that answers a prompt with the tokens that `reply(prompt ids)` gives, then with `end_id`.

    It begins the reply anew if the request ignores `end_id`. `fail(step)` may raise; `delay_s` is the duration of a
    step.
    """

    def __init__(self, limits, reply, end_id=2, *, delay_s=0.0, fail=lambda step: None):
        self.limits, self.reply, self.end_id, self.delay_s, self.fail = limits, reply, end_id, delay_s, fail
        self.slots: dict[int, list] = {}
        self.closed = False

    def submit(self, step):
        self.fail(step)
        if isinstance(step, Admit):
            self.slots[step.slot] = [step, [], None, 0]
            return _Now(StepResult())
        if isinstance(step, Release):
            self.slots.pop(step.slot, None)
            return _Now(StepResult())
        if self.delay_s:
            time.sleep(self.delay_s)
        if isinstance(step, Prefill):
            slot = self.slots[step.slot]
            slot[1].extend(step.token_ids)
            if not step.is_last:
                return _Now(StepResult((SlotResult(),)))
            slot[2] = [*self.reply(slot[1]), self.end_id]
            return _Now(StepResult((self._next(slot),)))
        return _Now(StepResult(tuple([self._next(self.slots[number]) for number in step.slots])))

    def _next(self, slot) -> SlotResult:
        admit, _, answer, done = slot
        ends = self.end_id in admit.stop_token_ids
        if done >= (min(len(answer), admit.max_new_tokens) if ends else admit.max_new_tokens):
            return SlotResult()
        slot[3] = done + 1
        token = answer[done % len(answer)]
        count = admit.sampling.logprobs
        top = ((token, -0.5), *_OTHERS)[:count]
        return SlotResult((token,), (TokenLogprobs(token, -0.5, top),) if count else ())

    def prompt_logits(self, slot, token_ids):
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class _Now:
    __slots__ = ("result",)

    def __init__(self, result):
        self.result = result

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


def saying_llm(
    folder: Path, reply: Callable[[str], str], *, template: str = TOOL_TEMPLATE, limits=None, **settings
) -> LLM:
    """Return a model with a tokenizer of single bytes that answers a prompt's text with `reply(text)`."""
    if not (folder / "config.json").exists():
        write_checkpoint(folder)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    llm = LLM(folder, executor="reference", max_context=64)
    tokenizer = llm.tokenizer
    limits = limits or ExecutorLimits(max_sequences=4, max_context=4096, prefill_chunk=256, run_ahead=2)

    def reply_ids(prompt):
        return tokenizer.encode(reply(tokenizer.decode(prompt)), add_special_tokens=False)

    llm.engine.close()
    llm.use(Engine(Saying(limits, reply_ids, **settings)))
    return llm
