"""A small model with a draft of its own on a GPU proposes what it proposes without one, and no token changes."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from executors.cuda_models import BASE, ROWS
from executors.test_cuda_speculation import DRAFTS, PROMPTS, W4, write
from speculation_steps import SETTINGS, beside_a_neighbour, generate, prefill

from cpmrt import LLM
from cpmrt.config import Sampling
from cpmrt.executor import Decode, Speculate
from cpmrt.weights.model_folder import ModelFolder

pytestmark = pytest.mark.gpu

DEMO = str(ModelFolder.open(None).path)
CHAINS = [(7, 1, 8), (3, 1, 4), (1, 1, 2)]
INNER = {"eagle2": [(2, 4, 6)], "eagle3": [(3, 2, 8)], "lookup": [(3, 1, 4)], DEMO: [(2, 1, 3)]}
"""Drafts of the bundled model, which drafts for itself, with their tree shapes; the last one is the model again."""
STAND_FOR_ALL = "eagle2", "eagle3"
"""Two drafts that stand for all others: one reads the final hidden states, one the states of tapped layers."""
ALONE = "alone"
GREEDY = Sampling()


def wishes(inner, shapes=None, chains=CHAINS, **more):
    inner = {} if inner == ALONE else {"inner": {"draft": inner, "shapes": shapes or INNER[inner]}}
    return {"shapes": chains, "adaptive": False} | inner | more


@pytest.fixture(scope="module")
def opened():
    """A function that opens the bundled model with itself as the small model, which has the draft `inner`.

    None means without any draft.
    """
    found = []

    @cache
    def open_one(inner, chains=tuple(CHAINS), **settings):
        given = {} if inner is None else {"draft": DEMO, "speculate": wishes(inner, chains=list(chains))}
        llm = LLM(**{"executor": "cuda", "max_context": 512, "prefill_chunk": 64} | given | settings)
        found.append(llm)
        return llm.executor

    yield open_one
    for llm in found:
        llm.close()


def steps_of(executor, num_tokens=40):
    """Return the tokens, log-probabilities and lengths of steps for every prompt and setting."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        for place, sampling in enumerate(SETTINGS.values()):
            shapes = (0, 1, 2, "decode", 0) if (number + place) % 2 else (0,)
            found.append(generate(executor, prompt, sampling, shapes, count=num_tokens))
    return found


def plain(executor, num_tokens):
    """Return what plain decoding gives for every prompt and setting."""
    cases = ((prompt, sampling) for prompt in PROMPTS for sampling in SETTINGS.values())
    return [generate(executor, prompt, sampling, count=num_tokens)[0] for prompt, sampling in cases]


@pytest.mark.parametrize(("inner", "settings"), [*((inner, {}) for inner in INNER), *product(STAND_FOR_ALL, [
    {"dtype": "float16"}, {"kv_dtype": "fp8"}, {"cuda_graphs": False}, {"dependent_launch": False},
    {"steps_per_launch": 8},
])], ids=str)  # fmt: skip
def test_steps_are_those_of_the_small_model_alone(opened, inner, settings):
    exact = {name: value for name, value in settings.items() if name in ("dtype", "kv_dtype")}
    found = steps_of(opened(inner, **settings))
    assert found == steps_of(opened(ALONE, **exact))
    assert [tokens for tokens, _ in found] == plain(opened(None, **exact), 40)


@pytest.mark.parametrize("inner", INNER)
def test_a_small_model_that_is_the_target_is_always_right(opened, inner):
    for prompt in PROMPTS:
        assert generate(opened(inner), prompt, GREEDY, (0,), count=33)[1] == [8] * 4, prompt


@pytest.mark.parametrize("inner", ["eagle2", "eagle3", DEMO])
def test_its_keys_and_values_are_those_of_a_draft_of_a_target(opened, inner):
    """Its keys and values agree for every token of the text, after chunks, plain steps, forced tokens and chains."""
    executor, text = opened(inner, dtype="bfloat16"), list(PROMPTS[3])
    text += prefill(executor, 0, PROMPTS[3], SETTINGS["sampled"], count=240).token_ids
    long, short, plain_step = Speculate((0,), 0), Speculate((0,), 1), Decode((0,))
    for step in [*[long] * 3, *[plain_step] * 66, short, "forced", *[plain_step] * 3, "forced", long]:
        if step == "forced":
            step = Decode((0,), certain=((5, 9, 9, 7),))
        text += executor.submit(step).wait().slots[0].token_ids
    seen, pages = len(text) - 1, range(8)
    executor.submit(Speculate((0,), 0)).wait()
    with LLM(executor="cuda", dtype="bfloat16", max_context=512, prefill_chunk=64, draft=inner,
             speculate={"shapes": INNER[inner], "adaptive": False}) as llm:  # fmt: skip
        prefill(llm.executor, 0, tuple(text), GREEDY, count=99)
        llm.executor.submit(Speculate((0,), 0)).wait()
        kept = (executor.read_pages(pages), "draft.draft."), (llm.executor.read_pages(pages), "draft.")
        for name in ("k_pages", "v_pages"):
            found, expected = (by_token(caches[prefix + name])[:, :seen] for caches, prefix in kept)
            assert expected.any(axis=(0, 2)).all()
            differences = np.linalg.norm(found - expected, axis=2) / np.linalg.norm(expected, axis=2)
            assert differences.max() < 0.1, (name, differences.max(axis=0).round(2).tolist())


def by_token(pages):
    """Return bfloat16 words [layers, pages, heads, 64, D] as numbers [layers, positions, heads * D]."""
    values = (pages.astype(np.uint32) << 16).view(np.float32).swapaxes(2, 3)
    return values.reshape(len(values), -1, values.shape[3] * values.shape[4])


def test_after_many_plain_steps_and_a_prompt_out_of_the_pages(opened):
    """Tokens stay the same when more tokens wait than the draft keeps, and for a prompt whose first page is cached."""
    for inner in ("eagle2", "lookup"):
        found = []
        for name in (ALONE, inner):
            executor = opened(name)
            tokens = list(prefill(executor, 0, PROMPTS[1], GREEDY, count=240).token_ids)
            for step in [Decode((0,))] * 130 + [Speculate((0,), 0)] * 4:
                tokens += executor.submit(step).wait().slots[0].token_ids
            again = list(prefill(executor, 0, PROMPTS[3], SETTINGS["sampled"], start=64, count=60).token_ids)
            for _ in range(6):
                again.append(executor.submit(Speculate((0,), 0)).wait().slots[0].token_ids)
            found.append((tokens, again))
        assert found[0] == found[1]


@pytest.mark.parametrize("inner", ["eagle2", "lookup"])
@pytest.mark.parametrize("max_context", [128, 134])
def test_up_to_the_last_position_of_the_context(opened, inner, max_context):
    """No keys are written past a slot's pages: its neighbour's tokens are those without a draft."""
    settings = {"max_context": max_context, "max_sequences": 2}
    prompt, other = (PROMPTS[3] * 2)[: max_context - 20], PROMPTS[1]
    both = (opened(inner, **settings), (0, 1)), (opened(None, **settings), ("decode",))
    results = [beside_a_neighbour(executor, prompt, other, steps, 20) for executor, steps in both]
    assert results[0] == results[1] and len(results[0][0][0]) == 20


def test_steps_of_a_sequence_that_has_ended_give_nothing(opened):
    """Steps of a sequence that has ended give nothing, also in a slot that has had no chain yet."""
    executor = opened("eagle2", max_sequences=2)
    for slot in (1, 0, 1):
        prefill(executor, slot, PROMPTS[1], GREEDY, count=1)
        assert executor.submit(Speculate((slot,), 0)).wait().slots[0].token_ids == ()
        if slot:
            assert generate(executor, PROMPTS[1], GREEDY, (0,), count=33)[1] == [8] * 4


@pytest.mark.parametrize(("inner", "is_w4"), [("dspark", False), ("eagle2", True), ("eagle2 of two layers", False)])
def test_random_weights(tmp_path, inner, is_w4):
    """No token changes with a small model of another depth, quantised or not, and drafts that are never right."""
    config = BASE | ROWS["minicpm"] | ({"hidden_size": 256, "intermediate_size": 256} if is_w4 else {})
    weights = {"quantization_config": W4} if is_w4 else {}
    own = {key: value for key, value in config.items() if inner != "dspark" or key != "scale_depth"}
    own |= {"architectures": ["EagleForCausalLM"]} | DRAFTS[inner] | weights
    target, draft = write(tmp_path / "target", config | weights), str(write(tmp_path / "inner", own))
    small = str(write(tmp_path / "small", config | weights | {"num_hidden_layers": 3}))
    shapes = [(4, 1, 5)] if inner == "dspark" else [(2, 4, 6)]
    results = []
    for given in ({}, {"speculate": wishes(ALONE)}, {"speculate": wishes(draft, shapes)}):
        settings = {"executor": "cuda", "load_format": "dummy", "max_context": 512, "prefill_chunk": 64}
        with LLM(target, **settings, **({"draft": small} if given else {}), **given) as llm:
            results.append(steps_of(llm.executor, 24) if given else plain(llm.executor, 24))
    assert results[1] == results[2]
    assert results[0] == [tokens for tokens, _ in results[1]]


@pytest.mark.parametrize("inner", ["eagle2", "eagle3", "lookup"])
def test_steps_are_those_of_numpy(inner):
    """On the bundled model at least 80 of 100 steps give as many tokens as NumPy's; rounding changes the others."""
    for sampling in (GREEDY, SETTINGS["sampled"]):
        found = {}
        for executor in ("cuda", "reference"):
            with LLM(executor=executor, draft=DEMO, dtype="float16", max_context=256, prefill_chunk=64,
                     speculate=wishes(inner)) as llm:  # fmt: skip
                ids = tuple(llm.tokenizer.encode('def parse(text):\n    """Split the text into words."""\n' * 3))
                found[executor] = generate(llm.executor, ids, sampling, (0,), count=40)[1]
        common = min(map(len, found.values()))
        agreeing = sum(a == b for a, b in zip(*(lengths[:common] for lengths in found.values()), strict=True))
        assert agreeing >= 0.8 * common, found
