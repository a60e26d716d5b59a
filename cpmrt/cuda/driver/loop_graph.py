"""A graph that is one WHILE node: a launch runs the captured body until a kernel of it says that it was the last time.

That kernel calls `cudaGraphSetConditional` with the node's handle. It is 1 when the launch begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cupy.cuda.runtime import CUDARuntimeError

from cpmrt.cuda.driver.device import Device
from cpmrt.errors import ConfigError

_FIRST_VERSION = (12, 4)
"""Of CUDA, with WHILE nodes and capture into their bodies."""


def check_loops(device: Device) -> None:
    """Raises ConfigError if the driver has no WHILE nodes."""
    if device.driver_version < _FIRST_VERSION:
        raise ConfigError(
            "steps_per_launch: the driver has no conditional graph nodes",
            expected="CUDA {}.{} or newer".format(*_FIRST_VERSION),
            actual="CUDA {}.{}".format(*device.driver_version),
            fix="update the driver, or leave steps_per_launch at 1",
        )


class LoopGraph:
    """Captured from `body(handle)`, launches on `stream` that must have run before. Raises CUDARuntimeError."""

    def __init__(self, stream: Any, body: Callable[[np.uint64], None]):
        from cuda.bindings import driver

        self._stream = stream
        self._graph = _result(driver.cuGraphCreate(0))
        context, always = _result(driver.cuCtxGetCurrent()), int(driver.CU_GRAPH_COND_ASSIGN_DEFAULT)
        handle = _result(driver.cuGraphConditionalHandleCreate(self._graph, context, 1, always))
        body_graph = _add_while_node(driver, self._graph, context, handle)
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _result(driver.cuStreamBeginCaptureToGraph(stream.ptr, body_graph, None, None, 0, relaxed))
        try:
            with stream:
                body(np.uint64(int(handle)))
        finally:
            captured = driver.cuStreamEndCapture(stream.ptr)
        _result(captured)
        self._executable = _result(driver.cuGraphInstantiate(self._graph, 0))
        _result(driver.cuGraphUpload(self._executable, stream.ptr))
        self._launch = driver.cuGraphLaunch

    def launch(self) -> None:
        """Start it on its stream; waits for nothing."""
        _result(self._launch(self._executable, self._stream.ptr))

    def close(self) -> None:
        """Free both graphs; no launch may be running. After a fault the driver frees nothing any more."""
        from cuda.bindings import driver

        driver.cuGraphExecDestroy(self._executable)
        driver.cuGraphDestroy(self._graph)


def _add_while_node(driver: Any, graph: Any, context: Any, handle: Any) -> Any:
    """The empty graph that becomes the node's body."""
    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node.conditional.handle, node.conditional.ctx = handle, context
    node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    node.conditional.size = 1
    # With the bindings of CUDA 12 the function of five arguments, dependency data among them, has a name of its own.
    add = getattr(driver, "cuGraphAddNode_v2", driver.cuGraphAddNode)
    _result(add(graph, None, None, 0, node))
    return node.conditional.phGraph_out[0]


def _result(call: tuple[Any, ...]) -> Any:
    status, *values = call
    if int(status):
        raise CUDARuntimeError(int(status))
    return values[0] if values else None
