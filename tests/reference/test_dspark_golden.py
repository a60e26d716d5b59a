"""The blocks of DSpark drafts against the same written in torch and float64 (tests/golden/dspark)."""

from __future__ import annotations

import json
from itertools import cycle

import numpy as np
import pytest
from draft_checkpoint import write_folder
from reference.golden_models import golden, relative
from reference.tiny_models import GOLDEN, random_weights, unpacked

from cpmrt.config import EngineConfig, ModelConfig, Sampling, SpeculationConfig, TreeShape
from cpmrt.config.dspark import read_dspark
from cpmrt.executor import Admit, Decode, Prefill, Speculate
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.draft import tensor_specs as draft_tensor_specs
from cpmrt.models.drafts.dspark import MarkovWeights
from cpmrt.reference.assembly import open_executor
from cpmrt.reference.draft_block import choose_block, confidence
from cpmrt.weights.model_folder import ModelFolder

NAMES = ("llama", "qwen3")
SHAPES = tuple(TreeShape.chain(length) for length in (4, 2, 1))
PLAIN, BLOCK, SHORT = Decode((0,)), Speculate((0,), 0), Speculate((0,), 2)
STEPS = {
    "blocks": (BLOCK,),
    "mixed": (PLAIN, BLOCK, PLAIN, PLAIN, SHORT),
    "plain": (PLAIN,),
}


def open_golden(tmp_path, name, changes=(), dtype="float32", prefill_chunk=16, **wishes):
    """Open the golden model with its draft, whose config.json has the `changes`, on the reference executor."""
    file, target = golden(f"dspark/{name}"), tmp_path / "target"
    settings, draft = json.loads(str(file["config"])), json.loads(str(file["draft_config"]))
    wish, config = SpeculationConfig("dspark", SHAPES, **wishes), ModelConfig.from_hf(settings)
    specs, drafting = tensor_specs(config), draft_tensor_specs(read_dspark(draft, None, config, wish))
    seed = int(file["seed"])
    write_folder(target, settings, unpacked(specs, random_weights(specs, seed)))
    write_folder(tmp_path / "draft", {**draft, **dict(changes)}, unpacked(drafting, random_weights(drafting, seed)))
    engine = EngineConfig(
        executor="reference", max_context=128, memory_budget=1 << 30, draft=str(tmp_path / "draft"), speculation=wish,
        dtype=dtype, prefill_chunk=prefill_chunk,
    )  # fmt: skip
    return open_executor(ModelFolder.open(target), engine)[0]


def prefill(executor, file):
    """Run the prompt; return the greedy tokens so far."""
    prompt, chunk = tuple(file["prompt_ids"].tolist()), executor.limits.prefill_chunk
    executor.submit(Admit(0, Sampling(), 1, 64, ())).wait()
    for start in range(0, len(prompt), chunk):
        step = Prefill(0, prompt[start : start + chunk], start, start + chunk >= len(prompt))
        result = executor.submit(step).wait()
    return list(result.slots[0].token_ids)


def drafted(executor, shape=SHAPES[0]):
    nodes = executor.proposed(0, shape)
    return nodes.tokens[1:][nodes.parents[1:] >= 0].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", STEPS)
def test_blocks_behind_every_kind_of_step(tmp_path, name, steps):
    """Blocks are right for a prompt in three chunks and any number of waiting tokens; rejected ones leave no trace."""
    executor, file = open_golden(tmp_path, name), golden(f"dspark/{name}")
    greedy, tokens, kinds = file["greedy_ids"].tolist(), prefill(executor, file), cycle(STEPS[steps])
    while len(tokens) <= len(greedy):
        assert tokens == greedy[: len(tokens)]
        assert drafted(executor) == file["drafts"][len(tokens) - 1][:4].tolist()
        tokens += executor.submit(next(kinds)).wait().slots[0].token_ids


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_confidences(tmp_path, name):
    executor, file = open_golden(tmp_path, name), golden(f"dspark/{name}")
    tokens = prefill(executor, file)
    while len(tokens) < len(file["greedy_ids"]):
        tokens += executor.submit(PLAIN).wait().slots[0].token_ids
    drafted(executor)
    assert relative(executor.array("draft.logits"), file["logits"]) < 1e-4
    parts = ("markov_w1", "markov_w2", "confidence", "confidence_bias")
    markov = MarkovWeights(*(executor.array(f"draft.{part}") for part in parts))
    previous = [tokens[-1], *file["drafts"][-1][:-1].tolist()]
    found = [
        confidence(state, markov.first[token], markov)
        for state, token in zip(executor.array("draft.states"), previous, strict=True)
    ]
    np.testing.assert_allclose(found, file["confidences"][-1], rtol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_chain_ends_before_the_first_token_of_too_little_confidence(tmp_path, rank):
    file = golden("dspark/llama")
    confidences = file["confidences"][0][:4]
    least = float(np.sort(confidences)[rank - 1 : rank + 1].mean())
    executor = open_golden(tmp_path, "llama", min_confidence=least)
    prefill(executor, file)
    kept = int(np.argmax(confidences < least))
    assert drafted(executor) == file["drafts"][0][:kept].tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 1e4}}, {"mask_token_id": 42}, {"target_layer_ids": [1, 2]},
        {"target_layer_ids": [2, 0]}, {"block_size": 4},
    ],
    ids=str,
)  # fmt: skip
def test_each_field_counts(tmp_path, change):
    """The comparison fails for a draft whose config has one other value."""
    executor, file = open_golden(tmp_path, "llama", change), golden("dspark/llama")
    tokens, agrees = prefill(executor, file), []
    while len(tokens) < len(file["greedy_ids"]):
        agrees.append(drafted(executor) == file["drafts"][len(tokens) - 1][:4].tolist())
        tokens += executor.submit(PLAIN).wait().slots[0].token_ids
    assert not all(agrees)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_storage_mostly_drafts_the_same(tmp_path, dtype):
    executor, file = open_golden(tmp_path, "llama", dtype=dtype), golden("dspark/llama")
    tokens, agree = prefill(executor, file), []
    while tokens == file["greedy_ids"][: len(tokens)].tolist() and len(tokens) < len(file["greedy_ids"]):
        agree += [a == b for a, b in zip(drafted(executor), file["drafts"][len(tokens) - 1], strict=False)]
        tokens += executor.submit(PLAIN).wait().slots[0].token_ids
    assert len(agree) >= 8 and np.mean(agree) > 0.7


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(("vocab", "parts"), [(704, 8), (700, 4), (601, 1)])
def test_the_markov_chain_over_a_large_vocabulary(vocab, parts, is_cut):
    """Over a large vocabulary a chain is that of loops in float64; the 32 best rows of each part of the head count."""
    random, size, rank, hidden = np.random.default_rng(6), 5, 4, 8
    logits, states = (random.standard_normal((size, width)).astype(np.float32) for width in (vocab, hidden))
    logits[2, 300:] = -3.0
    part = vocab // parts
    tokens = random.permutation(2 * vocab)[:vocab] if is_cut else np.arange(vocab)
    first, second = (3 * random.standard_normal((count, rank)).astype(np.float32) for count in (2 * vocab, vocab))
    markov = MarkovWeights(first, second, None, None)
    expected, previous = [], 17
    for row in logits:
        ranked = sorted(range(vocab), key=lambda unit: (-row[unit], unit))
        best = [unit for p in range(parts) for unit in [u for u in ranked if u // part == p][:32]]
        scores = {unit: float(row[unit]) + float(second[unit] @ first[previous].astype(float)) for unit in best}
        previous = int(tokens[max(sorted(scores), key=scores.__getitem__)])
        expected.append(previous)
    assert choose_block(logits, states, 17, size, markov, 0.9, tokens if is_cut else None) == expected
    assert expected != tokens[np.argmax(logits, axis=1)].tolist()
    before = [17, *expected[:-1]]
    unbounded = [int(tokens[np.argmax(row + second @ first[token])]) for row, token in zip(logits, before, strict=True)]
    assert unbounded != expected, "the bound of candidates was not tested"


def test_files_are_what_the_readme_says():
    for name in NAMES:
        file = golden(f"dspark/{name}")
        assert file["margin"] > 5e-3
        assert json.loads(str(file["metadata"]))["command"] == "python tools/make_golden.py dspark"
        base = np.argmax(file["logits"], axis=1).tolist()
        assert base != file["drafts"][-1].tolist(), "the Markov head changes nothing"
    assert {path.stem for path in (GOLDEN / "dspark").glob("*.npz")} == set(NAMES)
