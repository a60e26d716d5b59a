"""Integer settings of any type, NumPy's too: they are held as Python ints, which keys and kernel constants are made
of."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.config import EngineConfig, SpeculationConfig, TreeShape
from cpmrt.errors import ConfigError


def assert_own_integers(settings: object) -> None:
    assert {type(getattr(settings, field.name)) for field in fields(settings)} & {np.int64, np.uint8, np.int8} == set()


def test_integers_of_numpy_are_taken():
    given = {"max_context": np.int64(512), "max_sequences": np.uint8(2), "seed": np.int64(-1)}
    settings = EngineConfig(**given, lm_head_bits=np.int8(4))
    assert settings == EngineConfig(max_context=512, max_sequences=2, seed=-1, lm_head_bits=4)
    assert_own_integers(settings)
    shape = TreeShape(np.int64(3), np.uint8(2), np.int64(4))
    assert_own_integers(shape)
    speculation = SpeculationConfig("eagle2", (shape,), draft_vocab=np.int64(4096), window=np.uint8(64),
                                    head_bits=np.int64(8))  # fmt: skip
    assert speculation == SpeculationConfig("eagle2", (TreeShape(3, 2, 4),), draft_vocab=4096, window=64, head_bits=8)
    assert_own_integers(speculation)


@pytest.mark.parametrize("value", [True, np.True_, 512.0, np.float32(512), "512", np.int64(0), np.uint64(2**63), [512]])
def test_nothing_else_is(value):
    with pytest.raises(ConfigError, match="max_context: expected an integer in"):
        EngineConfig(max_context=value)


def test_a_model_with_integers_of_numpy_answers_as_with_pythons(tmp_path):
    checkpoint, asked = write_checkpoint(tmp_path), SamplingParams(max_new_tokens=np.int64(4), temperature=1.0)
    answers = []
    for kind in (int, np.int64, np.uint64):
        settings = {"max_context": kind(64), "max_sequences": kind(2), "prefill_chunk": kind(8), "seed": kind(3)}
        with LLM(checkpoint, executor="reference", memory_budget=kind(2**30), **settings) as llm:
            answers.append((llm.max_context, llm.generate(["ab", "c"], asked)))
            assert type(llm.max_context) is int
    assert all(context == 64 for context, _ in answers)
    assert len({tuple(each.token_ids for each in answer) for _, answer in answers}) == 1
