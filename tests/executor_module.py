"""Imports the CUDA executor's module on machines without CuPy."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest


def executor_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module `cpmrt.cuda.executor`, imported for one test only with a CuPy that has nothing but names."""
    error = type("Error", (Exception,), {})
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(CUDARuntimeError=error),
        driver=SimpleNamespace(CUDADriverError=error),
        memory=SimpleNamespace(OutOfMemoryError=error),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=np.ndarray))
    monkeypatch.delitem(sys.modules, "cpmrt.cuda.executor", raising=False)
    found = importlib.import_module("cpmrt.cuda.executor")
    monkeypatch.delitem(sys.modules, "cpmrt.cuda.executor")
    return found
