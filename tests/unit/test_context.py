"""Creation of the device's context and of cuBLASLt during imports: it happens once, and silently fails without a
driver."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest

from cpmrt import executor_choice
from cpmrt.config import EngineConfig
from cpmrt.cuda.driver import blaslt, context
from cpmrt.cuda.driver.blaslt import CublasLtError
from cpmrt.executor_choice import begin_device


class Driver:
    """Stand-in for libcuda loaded by ctypes that notes the calls made to it."""

    def __init__(self, failing=()):
        self.calls, self._failing = [], failing

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, threading.current_thread().name))
            return int(name in self._failing)

        return call


@pytest.fixture
def threads(monkeypatch):
    """An object whose `join` waits for the threads that were begun; an error in one of them fails the test."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(context, "_has_begun", threading.Lock())
    monkeypatch.setattr(context, "_threads", [])
    yield SimpleNamespace(join=lambda: [each.join() for each in threading.enumerate() if each.name == "cpmrt-context"])
    assert not errors


def names(driver):
    return [name for name, _ in driver.calls]


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "make_ready"]


@pytest.mark.parametrize(("failing", "expected"), [
    ((), CALLS), (("cuInit",), CALLS[:1]), (("cuDeviceGet",), CALLS[:2]), (("cuDevicePrimaryCtxRetain",), CALLS[:3]),
    (("cuCtxSetCurrent",), CALLS[:4]),
])  # fmt: skip
def test_a_thread_creates_it(monkeypatch, threads, failing, expected):
    driver = Driver(failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(blaslt, "make_ready", lambda: driver.make_ready())
    monkeypatch.setattr(executor_choice, "find_spec", lambda name: name)
    begin_device(EngineConfig("auto", "auto", None, None, "auto"))
    threads.join()
    assert names(driver) == expected and {thread for _, thread in driver.calls} == {"cpmrt-context"}


def test_it_happens_once_and_can_be_waited_for(monkeypatch, threads):
    """The thread runs once a process, and a start can wait for its end before it captures graphs."""
    driver, may_end, ended = Driver(), threading.Event(), []

    def make_ready():
        may_end.wait(10)
        ended.append(True)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(blaslt, "make_ready", make_ready)
    context.await_setup()
    for _ in range(3):
        context.begin_context()
    waiting = threading.Thread(target=context.await_setup)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and not ended
    may_end.set()
    waiting.join()
    assert ended == [True] and names(driver) == CALLS[:-1]


def test_without_cupy_the_device_stays_as_it_is(monkeypatch):
    """Without CuPy no context is created: nothing could use it, and its memory would stay taken."""
    monkeypatch.setattr(executor_choice, "find_spec", lambda name: None)
    monkeypatch.setattr(context, "begin_context", lambda: pytest.fail("there is no CuPy"))
    begin_device(EngineConfig("auto", "auto", None, None, "auto"))


def test_without_a_driver_nothing_happens(monkeypatch, threads):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    context.begin_context()
    threads.join()


def test_without_the_library_there_is_a_context(monkeypatch, threads):
    driver = Driver()

    def missing():
        raise CublasLtError("cuBLASLt is not installed")

    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(blaslt, "make_ready", missing)
    context.begin_context()
    threads.join()
    assert names(driver) == CALLS[:-1]


def test_numpy_needs_none(monkeypatch, threads):
    monkeypatch.setattr(context, "begin_context", lambda: pytest.fail("no device was asked for"))
    begin_device(EngineConfig("reference", "auto", None, None, "auto"))
