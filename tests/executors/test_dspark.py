"""A DSpark draft on either executor: what it stores of the target's states and in blocks, and that it is right.

The target's logits depend on the last token only, so the draft's Markov head knows its greedy text. What the draft's
layers store still depends on the whole text.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from draft_checkpoint import write_folder
from executors.cuda_models import BASE, EMPTY_TOKENIZER
from reference.golden_models import relative
from reference.tiny_models import random_weights, unpacked
from speculation_steps import SETTINGS, generate, prefill

from cpmrt.config import EngineConfig, ModelConfig, SpeculationConfig, TreeShape
from cpmrt.config.dspark import read_dspark
from cpmrt.executor import Decode, Release, Speculate, TreeMasks
from cpmrt.executor_choice import on_executor
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.draft import tensor_specs as draft_tensor_specs
from cpmrt.weights.model_folder import ModelFolder

VOCAB, HIDDEN, RANK, BLOCK = 96, 128, 64, 5
TARGET: dict[str, Any] = BASE | {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "vocab_size": VOCAB, "eos_token_id": 0,
}  # fmt: skip
DRAFT: dict[str, Any] = TARGET | {
    "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 2, "block_size": BLOCK, "mask_token_id": 7,
    "markov_rank": RANK, "target_layer_ids": [1, 0], "rope_theta": 1e6, "intermediate_size": 256,
}  # fmt: skip
SHAPES = (TreeShape.chain(5), TreeShape.chain(2))
PROMPT = tuple(np.random.default_rng(4).integers(1, VOCAB, 75).tolist())
EXECUTORS = ["reference", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, random = tmp_path_factory.mktemp("models"), np.random.default_rng(2)
    config = ModelConfig.from_hf(TARGET)
    specs = tensor_specs(config)
    tensors = unpacked(specs, random_weights(specs, 5))
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values[:] = 0
    embedding = random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    before = np.roll(np.arange(VOCAB), 1)  # the token before each
    tensors |= {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(HIDDEN, np.float32)}
    tensors["lm_head.weight"] = embedding[before] / np.linalg.norm(embedding[0])
    write_folder(root / "target", TARGET, tensors)
    (root / "target" / "tokenizer.json").write_text(EMPTY_TOKENIZER)
    wish = SpeculationConfig("dspark", SHAPES)
    drafting = draft_tensor_specs(read_dspark(DRAFT, None, config, wish))
    draft = unpacked(drafting, random_weights(drafting, 6))
    codes = (random.standard_normal((VOCAB, RANK)) * RANK**-0.5).astype(np.float32)
    draft["markov_head.markov_w1.weight"] = codes
    draft["markov_head.markov_w2.weight"] = 60 * codes[before]
    write_folder(root / "draft", DRAFT, draft)
    (root / "shuffled.json").write_text(json.dumps(random.permutation(VOCAB).tolist()))
    return root


@pytest.fixture(scope="module")
def opened(folder):
    made = {}

    def open_one(executor: str, dtype: str = "float16", **wishes: Any) -> Any:
        key = executor, dtype, tuple(wishes.items())
        if key not in made:
            head = {"draft_vocab": str(folder / wishes["draft_vocab"])} if "draft_vocab" in wishes else {}
            wish = SpeculationConfig("dspark", SHAPES, **wishes | head)
            settings = EngineConfig(
                executor=executor, dtype=dtype, max_context=256, prefill_chunk=64, memory_budget=1 << 30,
                draft=str(folder / "draft"), speculation=wish,
            )  # fmt: skip
            model = ModelFolder.open(folder / "target")
            made[key] = on_executor(model, settings, lambda assembly: assembly.open_executor(model, settings))[0]
        return made[key]

    yield open_one
    for executor in made.values():
        executor.close()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "wishes", [{}, {"layer_bits": 8}, {"layer_bits": 4, "head_bits": 8}, {"draft_vocab": "shuffled.json"}], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_draft_that_knows_what_follows_is_always_right(opened, executor, wishes, dtype):
    tokens, lengths = generate(opened(executor, dtype, **wishes), PROMPT, SETTINGS["greedy"], (0, 1), count=1 + 4 * 9)
    assert lengths == [6, 3] * 4
    first = tokens[0][0]
    assert list(tokens[0]) == [(first + step) % VOCAB for step in range(37)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_blocks_under_masks(opened, executor):
    """A block's chain is cut where masks leave out its path, and keeps its length where they do not."""
    one = opened(executor)
    (first,) = prefill(one, 0, PROMPT, SETTINGS["greedy"], count=40, table=(0, 1)).token_ids
    emitted, lengths = [first], []
    for kept in (5, 5, 2, 0):
        masks = TreeMasks(find=lambda paths, kept=kept: {path: None for path in ((), *paths) if len(path) <= kept})
        (result,) = one.submit(Speculate((0,), 0, masks)).wait().slots
        emitted += result.token_ids
        lengths.append(len(result.token_ids))
    one.submit(Release(0)).wait()
    assert lengths == [6, 6, 3, 1]
    assert emitted == [(first + step) % VOCAB for step in range(len(emitted))]


def pages_after(executor, steps):
    """Return the tokens of the steps, and what the draft's pages hold of the text and of the last block."""
    tokens = list(prefill(executor, 0, PROMPT, SETTINGS["greedy"], count=100, table=(0, 1)).token_ids)
    for step in steps:
        base = len(PROMPT) + len(tokens) - 1
        tokens += executor.submit(step).wait().slots[0].token_ids
    found = executor.read_pages((0, 1))
    parts = []
    for name in ("draft.k_pages", "draft.v_pages"):
        array = np.asarray(found[name])
        heads = np.moveaxis(array, 2, 1)  # axes: layers, heads, pages, tokens, elements
        parts.append(heads.reshape(*heads.shape[:2], -1, heads.shape[-1])[:, :, : base + BLOCK])
    return tokens, parts


STEPS = {
    "blocks": (Speculate((0,), 0), Speculate((0,), 1), Speculate((0,), 0)),
    "after plain steps": (Decode((0,)), Decode((0,)), Speculate((0,), 0)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("steps", STEPS)
def test_both_executors_keep_the_same(opened, steps):
    """Both executors store the same keys: the text's from tapped states, a block's from rows that see each other."""
    (tokens, ours), (expected, theirs) = (pages_after(opened(kind), STEPS[steps]) for kind in ("cuda", "reference"))
    assert tokens == expected
    for mine, reference in zip(ours, theirs, strict=True):
        values = mine.view(np.float16).astype(np.float32) if mine.dtype != np.float32 else mine
        for part in (slice(None, -BLOCK), slice(-BLOCK, None)):
            for layer in range(2):
                assert relative(values[layer][:, part], reference[layer][:, part]) < 1e-2
