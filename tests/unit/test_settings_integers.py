"""Settings take integers of any kind and hold them as Python's own, which keys and constants of kernels are made of."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from cpmrt.config import EngineConfig, SpeculationConfig, TreeShape
from cpmrt.errors import ConfigError


def assert_own_integers(settings: object) -> None:
    assert {type(getattr(settings, field.name)) for field in fields(settings)} & {np.int64, np.uint8} == set()


def test_integers_of_numpy_are_taken():
    settings = EngineConfig(max_context=np.int64(512), max_sequences=np.uint8(2), seed=np.int64(-1))
    assert settings == EngineConfig(max_context=512, max_sequences=2, seed=-1)
    assert_own_integers(settings)
    shape = TreeShape(np.int64(3), np.uint8(2), np.int64(4))
    assert_own_integers(shape)
    speculation = SpeculationConfig("eagle2", (shape,), draft_vocab=np.int64(4096), window=np.uint8(64))
    assert speculation == SpeculationConfig("eagle2", (TreeShape(3, 2, 4),), draft_vocab=4096, window=64)
    assert_own_integers(speculation)


@pytest.mark.parametrize("value", [True, np.True_, 512.0, np.float32(512), "512", np.int64(0), np.uint64(2**63), [512]])
def test_nothing_else_is(value):
    with pytest.raises(ConfigError, match="max_context: expected an integer in"):
        EngineConfig(max_context=value)
