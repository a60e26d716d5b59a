"""Work of the CUDA executor outside of steps: waiting decode steps are launched before it. No device."""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from executor_module import executor_module

from cpmrt.cuda.driver.graphs import LaunchQueue


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return executor_module(monkeypatch)


@pytest.fixture
def executor(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor whose `done` lists work in the order it reaches the stream; steps wait until four are queued."""
    made, done = object.__new__(module.CudaExecutor), list[str]()

    def note(what: str, result: Any = None) -> Callable[..., Any]:
        return lambda *_: (done.append(what), result)[1]

    made._closed, made._threads = False, local()
    made._threads.is_current = True
    made._layout = made._slot_states = SimpleNamespace(check_table=lambda table: None, begin=note("state"))
    made._prompts = SimpleNamespace(set_table=note("table"), run=note("chunk"), logits=note("logits", np.zeros(1)))
    made._limits, made._buckets = SimpleNamespace(prefill_chunk=64), (64,)
    made.plan, made._arrays, made.stream = SimpleNamespace(paged=lambda arrays: arrays), {}, None
    made._graphs, made.done = LaunchQueue(note("step"), 4), done
    monkeypatch.setattr(module, "read_pages", note("read"))
    monkeypatch.setattr(module, "write_pages", note("write"))
    return made


@pytest.mark.parametrize(("begin", "expected"), [
    (lambda executor: list(executor.prompt_logits(0, (1, 2, 3), (5,))), ["table", "state", "chunk", "logits"]),
    (lambda executor: executor.read_pages([5]), ["read"]),
    (lambda executor: executor.write_pages([5], {}), ["write"]),
], ids=["prompt", "read", "write"])  # fmt: skip
def test_steps_that_wait_are_launched_before(executor: Any, begin: Callable[[Any], Any], expected: list[str]) -> None:
    """Waiting steps of a cancelled sequence are launched before its slot and pages, which they write to, are reused."""
    for _ in range(3):
        executor._graphs.add("decode", (0,))
    assert not executor.done
    begin(executor)
    assert executor.done == ["step"] * 3 + expected
