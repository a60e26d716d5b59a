"""What decode steps on a GPU are launched as."""

from __future__ import annotations

from typing import Any

import pytest


def chosen_graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list of the graphs of all decode steps without masks from now on."""
    from cpmrt.cuda.executor import CudaExecutor  # which needs CuPy

    found, real = list[tuple[Any, ...]](), CudaExecutor._decode_graph

    def spied(self: CudaExecutor, slots: tuple[int, ...]) -> tuple[Any, ...]:
        found.append(graph := real(self, slots))
        return graph

    monkeypatch.setattr(CudaExecutor, "_decode_graph", spied)
    return found
