"""The CUDA executor's module where there is no CuPy."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest


def executor_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return it with a CuPy of which only names are asked; imported for one test alone."""
    error = type("Error", (Exception,), {})
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(CUDARuntimeError=error), driver=SimpleNamespace(CUDADriverError=error)
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=np.ndarray))
    monkeypatch.delitem(sys.modules, "cpmrt.cuda.executor", raising=False)
    found = importlib.import_module("cpmrt.cuda.executor")
    monkeypatch.delitem(sys.modules, "cpmrt.cuda.executor")
    return found
