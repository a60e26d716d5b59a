"""A spy on the graphs that decode steps on a GPU are launched as."""

from __future__ import annotations

from typing import Any

import pytest


def chosen_graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list of the graphs of all decode steps without masks from now on: for how many rows, of which kind, and
    whether they screen the head."""
    from cpmrt.cuda.executor import CudaExecutor  # this module needs CuPy

    found, real = list[tuple[Any, ...]](), CudaExecutor._decode_form

    def spied(self: CudaExecutor, slots: tuple[int, ...]) -> tuple[Any, ...]:
        found.append(form := real(self, slots))
        return form

    monkeypatch.setattr(CudaExecutor, "_decode_form", spied)
    return found
