"""Models with attention and lightning layers against the same written in torch and float64 (tests/golden/hybrid)."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from reference.golden_models import logits_of, relative
from reference.hybrid_models import HYBRID, executor_for, golden, model, tokens
from reference.tiny_models import GOLDEN, make_executor

from cpmrt.config import Sampling
from cpmrt.config.layers import LightningAttention
from cpmrt.dtypes import DType
from cpmrt.engine import Engine, Request

NAMES = pytest.mark.parametrize("name", HYBRID)
TOLERANCE = 1e-4


@NAMES
@pytest.mark.parametrize("chunk", [64, 200, 1024])
def test_logits(name, chunk):
    logits = logits_of(executor_for(name, prefill_chunk=chunk), tokens(name))[golden(name)["positions"]]
    assert relative(logits, golden(name)["logits"]) < TOLERANCE
    assert np.abs(logits - golden(name)["logits"]).max() < TOLERANCE * np.abs(logits).max()


@NAMES
def test_greedy_tokens(name):
    """Greedy tokens are the stored ones: the prompt is computed in blocks, the tokens after it by the recurrence."""
    prompt, expected = tuple(golden(name)["prompt_ids"].tolist()), golden(name)["greedy_ids"].tolist()
    engine = Engine(executor_for(name))
    sequence = engine.add(Request(prompt, Sampling(), seed=0, stop_token_ids=(), max_new_tokens=len(expected)))
    assert [token for result in engine.stream(sequence) for token in result.token_ids] == expected


@pytest.mark.parametrize(
    "change", [{"rope": False}, {"output_norm": False}, {"output_gate": False}, {"qk_norm": False}], ids=str
)
def test_each_part_of_lightning_attention_counts(change):
    """Without any one part of lightning attention the logits are far outside the tolerance."""
    config, weights = model("lightning_first")
    layers = [
        replace(layer, mixer=replace(layer.mixer, **change)) if isinstance(layer.mixer, LightningAttention) else layer
        for layer in config.layers
    ]
    changed = replace(config, layers=tuple(layers))
    names = {"output_norm": ("output_norm",), "output_gate": ("output_gate",), "qk_norm": ("q_norm", "k_norm")}
    left_out = names.get(next(iter(change)), ())
    kept = {
        name: weight
        for name, weight in weights.items()
        if not (name.split(".")[-1] in left_out and name.split(".")[1] in "02")
    }
    executor = make_executor(changed, kept, prefill_chunk=64)
    logits = logits_of(executor, tokens("lightning_first"))[golden("lightning_first")["positions"]]
    assert relative(logits, golden("lightning_first")["logits"]) > 100 * TOLERANCE


@NAMES
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_narrow_storage_stays_close(name, dtype):
    logits = logits_of(executor_for(name, dtype=dtype), tokens(name))[golden(name)["positions"]]
    error = relative(logits, golden(name)["logits"])
    assert 1e-5 < error < {DType.FLOAT16: 2e-2, DType.BFLOAT16: 1e-1}[dtype]


def test_files_are_what_the_readme_says():
    for name in HYBRID:
        assert golden(name)["margin"] > 1e-3
        assert golden(name)["gap"] > 1e-5
        assert json.loads(str(golden(name)["metadata"]))["command"] == "python tools/make_golden.py hybrid"
    assert {path.stem for path in (GOLDEN / "hybrid").glob("*.npz")} == set(HYBRID)
