"""Captures each step shape once as a CUDA graph and replays it, several steps a launch where that is wanted."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from functools import partial
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from cpmrt.cuda.driver.captures import CAPTURES
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.faults import checked, device_fault, device_faults
from cpmrt.errors import ConfigError

if TYPE_CHECKING:
    from cuda.bindings import driver
    from cupy.cuda import Stream

_MOST_STEPS_PER_PASS = 4
"""The most steps in the body of a WHILE node, which needs about 5 us between two passes of its body."""
_FIRST_WITH_LOOPS = (12, 4)
"""The first version of CUDA with WHILE nodes and capture into their bodies."""


class Graphs:
    """Runs named launch sequences on one stream: as graph replays, or launch by launch where graphs are off.

    With `steps_per_launch` above 1, which needs graphs, so many equal steps in a row are one launch. `release` launches
    what a launcher still holds back; it is called at the end of a sequence and before a loop in it.
    """

    def __init__(
        self, stream: Stream, *, enabled: bool, steps_per_launch: int = 1, release: Callable[[], None] = lambda: None
    ):
        from cupy.cuda.runtime import CUDARuntimeError

        self._stream, self._enabled, self._steps_per_launch = stream, enabled, steps_per_launch
        self._release = release
        self._captured: dict[Hashable, list[Callable[[], None]]] = {}
        self._parts: list[Callable[[], None]] | None = None
        """Functions that launch the graphs of the sequence that is being captured; None outside a capture."""
        self._loops: dict[Hashable, LoopGraph] = {}
        self._loops_within: list[LoopGraph] = []
        self._sequences: dict[Hashable, Callable[[], None]] = {}
        self._queue = LaunchQueue(self._start, steps_per_launch)
        self._error: type[Exception] = CUDARuntimeError

    def add(self, key: Hashable, launches: Callable[[], None]) -> None:
        """Capture `launches`, which must have run before: a capture may neither load modules nor allocate.

        Raises MemoryPlanError where the device has no room for the graph, DeviceError after a fault.
        """
        self._sequences[key] = launches
        if not self._enabled:
            return
        with CAPTURES, device_faults(), self._stream:
            self._captured[key] = self._capture(launches)

    def _capture(self, launches: Callable[[], None]) -> list[Callable[[], None]]:
        """Return functions that launch the graphs of `launches`: one, or with loops in it those between them too."""
        self._parts = parts = list[Callable[[], None]]()
        try:
            self._stream.begin_capture()
            launches()
            self._release()
        except BaseException:
            with suppress(self._error):  # the capture is spoiled, or a loop has failed between two of them
                self._stream.end_capture()
            raise
        else:
            self._end_part(parts)
        finally:
            self._parts = None
        return parts

    def loop(self, body: Callable[[], None], goes_on: Callable[[np.uint64], None], at_most: int) -> None:
        """Launch `body` again and again, at least once, until the kernel that `goes_on` launches ends the loop.

        The launches of a sequence call this. In a capture the loop is a WHILE node, whose handle `goes_on` gets; the
        launches before and after it become graphs of their own, which start one after another without the host. With
        graphs off, `body` runs `at_most` times, the handle is 0, and passes too many must have no effect.
        """
        self._release()
        if self._parts is None:
            for _ in range(at_most):
                body()
                goes_on(np.uint64(0))
            return

        def turn(handle: np.uint64) -> None:
            body()
            goes_on(handle)

        self._end_part(self._parts)
        loop = LoopGraph(self._stream, turn)
        self._loops_within.append(loop)
        self._parts.append(loop.launch)
        self._stream.begin_capture()

    def _end_part(self, parts: list[Callable[[], None]]) -> None:
        graph = self._stream.end_capture()
        graph.upload(self._stream)
        parts.append(partial(graph.launch, self._stream))

    def add_step(self, key: Hashable, launches: Callable[[], None], loop_end: Callable[..., None]) -> None:
        """Capture a step alone and, if several steps are one launch, a loop of them too.

        `loop_end(handle, passes, steps a pass)` launches the kernel that ends a pass of the loop.
        """
        self.add(key, launches)
        if self._steps_per_launch == 1:
            return
        num_steps = gcd(self._steps_per_launch, _MOST_STEPS_PER_PASS)

        def body(handle: np.uint64) -> None:
            for _ in range(num_steps):
                launches()
            loop_end(handle, self._steps_per_launch // num_steps, num_steps)

        self._loops[key] = LoopGraph(self._stream, body)

    def run(self, key: Hashable) -> None:
        """Start one sequence; waits for nothing. Raises DeviceError after a fault of the device."""
        self._queue.flush()
        self._start(key, 1)

    def run_step(self, key: Hashable, slots: tuple[int, ...]) -> Callable[[], None] | None:
        """Start a step on these slots, or let it wait so that it is launched with others. Raises as `run` does.

        Returns None if it has started. Else it starts with later steps, or when the returned function is called.
        """
        return self._queue.add(key, slots)

    def flush(self) -> None:
        """Start the steps that wait for others; to be called before anything but these sequences is launched."""
        self._queue.flush()

    def close(self) -> None:
        """Free the graphs."""
        for loop in (*self._loops.values(), *self._loops_within):
            loop.close()
        self._loops.clear()
        self._loops_within.clear()
        self._captured.clear()
        self._sequences.clear()

    def _start(self, key: Hashable, num_steps: int) -> None:
        if not self._enabled:
            self._sequences[key]()
            self._release()
            return
        try:
            if num_steps > 1:
                self._loops[key].launch()
            else:
                for launch in self._captured[key]:
                    launch()
        except self._error as error:
            raise device_fault(error) from error


class LaunchQueue:
    """A queue of equal steps that wait until one launch can run them all.

    `start(key, count)` launches a step `count` times: `steps_per_launch` times, or once. A caller that has something
    else to launch calls `flush` before.
    """

    def __init__(self, start: Callable[[Hashable, int], None], steps_per_launch: int):
        self._start, self._steps_per_launch = start, steps_per_launch
        self._kind: tuple[Hashable, tuple[int, ...]] = None, ()
        self._num_added = 0
        self.num_waiting = 0
        """Steps that were added last and are not launched yet, all alike."""

    def add(self, key: Hashable, slots: tuple[int, ...]) -> Callable[[], None] | None:
        """Add a step on these slots to the queue. Steps are equal if key and slots are the same.

        Returns None if the step is launched now, else a function that launches it if it still waits then.
        """
        if self._steps_per_launch == 1:
            self._start(key, 1)
            return None
        if self.num_waiting and self._kind != (key, slots):
            self.flush()
        self._kind = (key, slots)
        self._num_added += 1
        self.num_waiting += 1
        if self.num_waiting < self._steps_per_launch:
            return partial(self._start_if_waiting, self._num_added)
        self.num_waiting = 0
        self._start(key, self._steps_per_launch)
        return None

    def flush(self) -> None:
        """Launch the waiting steps one by one."""
        count, self.num_waiting = self.num_waiting, 0
        for _ in range(count):
            self._start(self._kind[0], 1)

    def _start_if_waiting(self, number: int) -> None:
        if number > self._num_added - self.num_waiting:
            self.flush()


class LoopGraph:
    """A graph that is one WHILE node: a launch runs the captured body until a kernel of it says it was the last time.

    That kernel calls `cudaGraphSetConditional` with the node's handle, which is 1 when the launch begins.
    `body(handle)` launches the kernels of one pass on `stream`; they must have run before, so that they are loaded.
    """

    def __init__(self, stream: Stream, body: Callable[[np.uint64], None]):
        from cuda.bindings import driver

        self._stream, self._launch = stream, driver.cuGraphLaunch
        with CAPTURES, ExitStack() as on_failure:
            self._graph = checked(driver.cuGraphCreate(0))
            on_failure.callback(driver.cuGraphDestroy, self._graph)
            self._capture(body)
            self._executable = checked(driver.cuGraphInstantiate(self._graph, 0))
            on_failure.callback(driver.cuGraphExecDestroy, self._executable)
            checked(driver.cuGraphUpload(self._executable, stream.ptr))
            on_failure.pop_all()

    def _capture(self, body: Callable[[np.uint64], None]) -> None:
        """Give the graph its WHILE node, and the node what `body` launches."""
        from cuda.bindings import driver

        stream = self._stream
        context, always = checked(driver.cuCtxGetCurrent()), int(driver.CU_GRAPH_COND_ASSIGN_DEFAULT)
        handle = checked(driver.cuGraphConditionalHandleCreate(self._graph, context, 1, always))
        body_graph = _add_while_node(self._graph, context, handle)
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        checked(driver.cuStreamBeginCaptureToGraph(stream.ptr, body_graph, None, None, 0, relaxed))
        try:
            with stream:
                body(np.uint64(int(handle)))
        finally:
            captured = driver.cuStreamEndCapture(stream.ptr)
        checked(captured)

    def launch(self) -> None:
        """Start it on its stream; waits for nothing. Raises CUDARuntimeError."""
        checked(self._launch(self._executable, self._stream.ptr))

    def close(self) -> None:
        """Free both graphs; no launch may be running. After a fault the driver frees nothing any more."""
        from cuda.bindings import driver

        driver.cuGraphExecDestroy(self._executable)
        driver.cuGraphDestroy(self._graph)


def _add_while_node(
    graph: driver.CUgraph, context: driver.CUcontext, handle: driver.CUgraphConditionalHandle
) -> driver.CUgraph:
    """Give `graph` its WHILE node; returns the empty graph that becomes the node's body."""
    from cuda.bindings import driver

    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node.conditional.handle, node.conditional.ctx = handle, context
    node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    node.conditional.size = 1
    # The bindings of CUDA 12 call the function with five arguments (dependency data among them) cuGraphAddNode_v2.
    add = getattr(driver, "cuGraphAddNode_v2", driver.cuGraphAddNode)
    checked(add(graph, None, None, 0, node))
    return node.conditional.phGraph_out[0]


def check_loops(device: Device, setting: str, otherwise: str) -> None:
    """Raise ConfigError if the driver has no WHILE nodes, which `setting` needs; `otherwise` says how to do without."""
    if device.driver_version < _FIRST_WITH_LOOPS:
        raise ConfigError(
            f"{setting}: the driver has no conditional graph nodes",
            expected="CUDA {}.{} or newer".format(*_FIRST_WITH_LOOPS),
            actual="CUDA {}.{}".format(*device.driver_version),
            fix=f"update the driver, or {otherwise}",
        )
