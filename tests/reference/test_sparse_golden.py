"""Sparse models on the reference executor against the same attention written in torch (tests/golden/sparse)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from reference import golden_models
from reference.golden_models import logits_of, relative
from reference.tiny_models import GOLDEN, make_executor, random_weights

from cpmrt.config import ModelConfig, Sampling, with_sparse_setting
from cpmrt.dtypes import DType
from cpmrt.engine import Engine, Request
from cpmrt.models.decoder import tensor_specs

NAMES = pytest.mark.parametrize("name", ["group4", "group1", "nope"])
TOLERANCE = 1e-4


def golden(name: str) -> Mapping[str, Any]:
    return golden_models.golden(f"sparse/{name}")


def executor_for(name: str, sparse: Any = "auto", **settings: Any) -> Any:
    config = ModelConfig.from_hf(with_sparse_setting(json.loads(str(golden(name)["config"])), sparse))
    weights = random_weights(tensor_specs(config), int(golden(name)["seed"]))
    return make_executor(config, weights, **settings)


def tokens(name: str) -> tuple[int, ...]:
    return golden_models.all_tokens(golden(name))


@NAMES
@pytest.mark.parametrize("chunk", [33, 1024])
def test_logits(name, chunk):
    logits = logits_of(executor_for(name, prefill_chunk=chunk), tokens(name))[golden(name)["positions"]]
    assert relative(logits, golden(name)["logits"]) < TOLERANCE
    assert np.abs(logits - golden(name)["logits"]).max() < TOLERANCE * np.abs(logits).max()


@NAMES
def test_greedy_tokens(name):
    """Greedy tokens are the stored ones, through prefill and decoding over ends of a block and of both windows."""
    prompt, expected = tuple(golden(name)["prompt_ids"].tolist()), golden(name)["greedy_ids"].tolist()
    engine = Engine(executor_for(name, prefill_chunk=64))
    sequence = engine.add(Request(prompt, Sampling(), seed=0, stop_token_ids=(), max_new_tokens=24))
    assert [token for result in engine.stream(sequence) for token in result.token_ids] == expected


@NAMES
def test_dense_attention_is_another_model(name):
    """With `sparse="off"` the logits of late positions are far outside the tolerance."""
    logits = logits_of(executor_for(name, "off", prefill_chunk=64), tokens(name))[golden(name)["positions"]]
    late = golden(name)["positions"] > 400
    assert relative(logits[late], golden(name)["logits"][late]) > 100 * TOLERANCE


def test_scores_before_rope_choose_otherwise():
    with_rope = executor_for("nope", {"use_nope": False}, prefill_chunk=64)
    logits = logits_of(with_rope, tokens("nope"))[golden("nope")["positions"]]
    assert relative(logits, golden("nope")["logits"]) > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_narrow_storage_stays_close(dtype):
    """In 16 bits logits stay close, though rounding changes choices between blocks of almost equal score."""
    logits = logits_of(executor_for("group4", dtype=dtype, prefill_chunk=64), tokens("group4"))
    error = relative(logits[golden("group4")["positions"]], golden("group4")["logits"])
    assert 1e-5 < error < {DType.FLOAT16: 2e-2, DType.BFLOAT16: 1e-1}[dtype]


def test_files_are_what_the_readme_says():
    for name in ("group4", "group1", "nope"):
        data = golden(name)
        assert data["margin"] > 1e-3
        assert data["gap"] > 1e-5
        metadata = json.loads(str(data["metadata"]))
        assert metadata["command"] == "python tools/make_golden.py sparse"
    assert {path.stem for path in (GOLDEN / "sparse").glob("*.npz")} == {"group4", "group1", "nope"}
