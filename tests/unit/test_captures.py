"""Captures of graphs without a device: errors of one that fails, and what must not happen during one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from cpmrt.cuda.driver.blaslt import CublasLt
from cpmrt.cuda.driver.graphs import Graphs, LoopGraph
from cpmrt.cuda.step.launches import run_on_padding
from cpmrt.errors import CpmrtError, DeviceError, MemoryPlanError

NO_MEMORY, FAULT, SPOILED = 2, 700, 901


class CudaError(Exception):
    """Stand-in for the error that CuPy raises when a call of the CUDA runtime fails."""

    def __init__(self, status: int):
        super().__init__(f"status {status}")
        self.status = status


class Stream:
    """A stream that captures nothing; its call named `fails_at` fails with `status`."""

    def __init__(self, fails_at: str = "", status: int = 0):
        self._fails_at, self._status = fails_at, status

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def begin_capture(self) -> None:
        self.call("begin_capture")

    def end_capture(self) -> Any:
        self.call("end_capture")
        return SimpleNamespace(upload=lambda stream: self.call("upload"), launch=lambda stream: None)

    def call(self, name: str) -> None:
        if name == self._fails_at:
            raise CudaError(self._status)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, other = SimpleNamespace(CUDARuntimeError=CudaError), type("Other", (Exception,), {})
    faults = {"driver": SimpleNamespace(CUDADriverError=other), "memory": SimpleNamespace(OutOfMemoryError=other)}
    cuda = SimpleNamespace(runtime=runtime, **faults)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.runtime", runtime)


@pytest.mark.parametrize("call", ["begin_capture", "end_capture", "upload"])
@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(NO_MEMORY, MemoryPlanError, "less free memory"), (FAULT, DeviceError, "the GPU failed")],
)
def test_a_capture_that_fails_says_why(call: str, status: int, error: type[CpmrtError], message: str) -> None:
    """A failed capture ends in an error that says why; steps under a form are captured while the server runs."""
    graphs = Graphs(Stream(call, status), enabled=True)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        graphs.add("step", lambda: None)


def test_what_runs_before_a_capture_says_so_too() -> None:
    def set_values(values: Any) -> None:
        raise CudaError(FAULT)

    launcher: Any = SimpleNamespace(
        recording=Stream, stream=Stream(), modules=SimpleNamespace(compile=lambda modules: None)
    )
    slots: Any = SimpleNamespace(shape=(2,), dtype="int32", set=set_values)
    graphs: Any = SimpleNamespace(flush=lambda: None)
    with pytest.raises(DeviceError, match="the GPU failed"):
        run_on_padding(launcher, graphs, slots, lambda: None)


def test_what_fails_within_a_capture_is_what_is_said() -> None:
    """A launch that fails also spoils the capture, whose end then fails too: the first error is the reason."""

    def launches() -> None:
        raise MemoryPlanError("no room for the kernel")

    graphs = Graphs(Stream("end_capture", SPOILED), enabled=True)  # type: ignore[arg-type]
    with pytest.raises(MemoryPlanError, match="no room for the kernel"):
        graphs.add("step", launches)


@pytest.mark.parametrize("call", ["begin_capture", "end_capture"])
def test_after_a_failed_capture_nothing_is_captured(call: str) -> None:
    """A loop outside of captures runs at once; it must not count as part of the capture that failed."""
    graphs, done = Graphs(Stream(call, NO_MEMORY), enabled=True), list[str]()  # type: ignore[arg-type]
    with pytest.raises(MemoryPlanError):
        graphs.add("step", lambda: None)
    graphs.loop(lambda: done.append("body"), lambda handle: done.append("end"), 2)
    assert done == ["body", "end"] * 2


def handle_of_another_model() -> tuple[CublasLt, Any]:
    library: Any = MagicMock()
    library.cublasLtCreate.return_value = 0
    handle = CublasLt(0, 0, library)
    handle._handle.value = 1
    return handle, library.cublasLtDestroy


def test_a_librarys_handle_is_given_back_between_captures() -> None:
    """That waits for the whole device, which would spoil a capture: also one of another model in the process."""
    (handle, destroyed), during = handle_of_another_model(), list[bool]()
    closing = Thread(target=handle.close)

    def launches() -> None:
        closing.start()
        closing.join(0.05)
        during.append(destroyed.called)

    Graphs(Stream(), enabled=True).add("step", launches)  # type: ignore[arg-type]
    closing.join()
    assert during == [False] and destroyed.called


def test_nothing_is_captured_while_a_librarys_handle_is_given_back() -> None:
    (handle, destroyed), begun = handle_of_another_model(), list[str]()
    graphs = Graphs(Stream(), enabled=True)  # type: ignore[arg-type]
    capturing = Thread(target=graphs.add, args=("step", lambda: begun.append("capture")))

    def destroy(given: Any) -> None:
        capturing.start()
        capturing.join(0.05)
        begun.append("destroyed")

    destroyed.side_effect = destroy
    handle.close()
    capturing.join()
    assert begun == ["destroyed", "capture"]


class Driver:
    """Stand-in for the driver's bindings whose function `fails_at` fails; `held` has the graphs that are not freed."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at, self.held = fails_at, set[str]()
        self.CU_GRAPH_COND_ASSIGN_DEFAULT = 1
        self.CUstreamCaptureMode = self.CUgraphNodeType = self.CUgraphConditionalNodeType = MagicMock()
        self.CUgraphNodeParams = MagicMock()
        self.cuGraphDestroy = self.cuGraphExecDestroy = self.held.discard

    def __getattr__(self, name: str) -> Callable[..., tuple[int, Any]]:
        made = {"cuGraphCreate": "graph", "cuGraphInstantiate": "executable"}.get(name)

        def call(*arguments: Any) -> tuple[int, Any]:
            if name == self._fails_at:
                return NO_MEMORY, None
            if made is not None:
                self.held.add(made)
            return 0, made or 1

        return call


@pytest.mark.parametrize("call", [
    "cuCtxGetCurrent", "cuGraphAddNode_v2", "cuStreamBeginCaptureToGraph", "cuStreamEndCapture", "cuGraphInstantiate",
    "cuGraphUpload",
])  # fmt: skip
def test_a_loop_that_cannot_be_captured_is_freed(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = Driver(call)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    stream: Any = Stream()
    stream.ptr = 1
    with pytest.raises(CudaError):
        LoopGraph(stream, lambda handle: None)
    assert not driver.held
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=(other := Driver("none"))))
    loop = LoopGraph(stream, lambda handle: None)
    assert other.held == {"graph", "executable"}
    loop.close()
    assert not other.held


def test_a_librarys_handle_is_given_back_before_or_after_a_loop_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of decode steps are captured on their own, outside of any other capture."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=Driver("none")))
    (handle, destroyed), during = handle_of_another_model(), list[bool]()
    closing, stream = Thread(target=handle.close), MagicMock()

    def body(_: object) -> None:
        closing.start()
        closing.join(0.05)
        during.append(destroyed.called)

    LoopGraph(stream, body)
    closing.join()
    assert during == [False] and destroyed.called
