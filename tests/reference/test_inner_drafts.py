"""A small model with a draft of its own drafts what it drafts alone, in as few passes as its draft is worth."""

from __future__ import annotations

import json
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from draft_checkpoint import VOCAB, write_all
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from reference.test_speculation import inner, open_with
from speculation_steps import SETTINGS, beside_a_neighbour, generate, prefill

from cpmrt.config import EngineConfig, SpeculationConfig, TreeShape
from cpmrt.executor import Decode, Speculate
from cpmrt.opening import described
from cpmrt.reference.assembly import ReferenceTarget, open_executor
from cpmrt.weights.model_folder import ModelFolder

LENGTH = 7
CHAIN = TreeShape.chain(LENGTH)
INNER = {
    "vllm": ("eagle2", TreeShape(2, 4, 6)),
    "eagle3": ("eagle3", TreeShape(3, 2, 8)),
    "dspark": ("dspark", TreeShape.chain(4)),
    "model": ("model", TreeShape.chain(2)),
    "target": ("model", TreeShape.chain(3)),
    None: ("lookup", TreeShape.chain(3)),
}
"""Drafts of the small model, which equals the target; "target" is the same model once more, and always right."""
EACH = [pytest.param(name, marks=[pytest.mark.all] * (name in ("eagle3", "model"))) for name in INNER]
PROMPTS = [tuple(np.random.default_rng(length).integers(3, VOCAB, length).tolist()) for length in (1, 9, 40, 70)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def executors(root):
    """A function that opens the target with itself as its small model, for which `name` drafts ("alone": nothing)."""

    @cache
    def opened(name="alone", **settings):
        wishes = {} if name == "alone" else inner(INNER[name][0], INNER[name][1], name)
        return open_small(root, wishes, **settings)

    return opened


def open_small(root, wishes, shapes=(CHAIN,), **settings):
    """Return an executor of the target, for which the target itself drafts as a small model with these `wishes`."""
    engine = {"executor": "reference", "prefill_chunk": 16, "max_context": 256, "memory_budget": 1 << 30} | settings
    config = EngineConfig(
        draft=str(root / "target"), speculation=SpeculationConfig("model", shapes, **wishes), **engine
    )  # fmt: skip
    return open_executor(ModelFolder.open(root / "target"), config)[0]


def run(executor, text, step):
    """Run a step and append its tokens to the text."""
    if step == "forced":
        step = Decode((0,), certain=((5, 9, 9, 7),))
    text += executor.submit(step).wait().slots[0].token_ids


def chains(executor, text, steps):
    """Run the steps; return the chains that are proposed before each step and after the last."""
    found = [executor.proposed(0, CHAIN).tokens.tolist()]
    for step in steps:
        run(executor, text, step)
        found.append(executor.proposed(0, CHAIN).tokens.tolist())
    return found


@pytest.mark.parametrize("draft", EACH)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50).map(tuple),
    name=st.sampled_from(list(SETTINGS)),
    steps=st.lists(st.sampled_from([Decode((0,)), Speculate((0,)), Speculate((0,)), "forced"]), max_size=6),
)
@examples(5)
def test_chains_are_those_of_the_small_model_alone(executors, draft, prompt, name, steps):
    found = []
    for executor in (executors(), executors(draft)):
        text = [*prompt, *prefill(executor, 0, prompt, SETTINGS[name], count=99).token_ids]
        found.append((chains(executor, text, steps), text))
    assert found[0] == found[1]


@pytest.mark.parametrize("draft", EACH)
def test_chains_are_the_same_after_many_plain_steps_and_a_prompt_out_of_the_pages(executors, draft):
    """Chains stay the same when more tokens wait than the draft keeps, and for a prompt whose first page is cached."""
    found = []
    for executor in (executors(), executors(draft)):
        prompt = PROMPTS[3]
        text = [*prompt, *prefill(executor, 0, prompt, SETTINGS["greedy"], count=180).token_ids]
        for _ in range(130):
            run(executor, text, Decode((0,)))
        of_steps = chains(executor, text, [Speculate((0,))] * 2)
        text = [*prompt, *prefill(executor, 0, prompt, SETTINGS["sampled"], start=64, count=60).token_ids]
        found.append((of_steps, chains(executor, text, [Speculate((0,))] * 4)))
    assert found[0] == found[1]


def passes_of(root, draft, text, num_tokens):
    """Return the passes in which the small model, as a target with the same draft, gives so many tokens after a text.

    Return the tokens too.
    """
    executor = own_target(root, draft)
    found, lengths = generate(executor, tuple(text), SETTINGS["greedy"], (0,), count=num_tokens + 3)
    return 1 + int(np.searchsorted(list(accumulate(lengths)), num_tokens - 1)) + 1, found[0][:num_tokens]


@cache
def own_target(root, draft):
    method, shape = INNER[draft]
    config = EngineConfig(
        "reference", prefill_chunk=16, max_context=256, memory_budget=1 << 30,
        draft=draft and str(root / draft), speculation=SpeculationConfig(method, (shape,)),
    )  # fmt: skip
    return open_executor(ModelFolder.open(root / "target"), config)[0]


@pytest.mark.parametrize("draft", EACH)
def test_the_small_model_takes_the_passes_that_it_takes_as_a_target(root, executors, draft):
    """The small model's draft sees what a target's draft sees, however much of earlier chains was accepted."""
    executor, saved = executors(draft), 0
    for prompt in PROMPTS[1:3]:
        text = [*prompt, *prefill(executor, 0, prompt, SETTINGS["sampled"], count=60).token_ids]
        for step in [Speculate((0,))] * 3 + [Decode((0,))] * 2 + [Speculate((0,))]:
            before = executor.num_draft_passes
            drafted = executor.proposed(0, CHAIN).tokens.tolist()[1:]
            num_passes, expected = passes_of(root, draft, text, LENGTH)
            assert drafted == list(expected)
            assert executor.num_draft_passes - before == num_passes
            saved += LENGTH - num_passes
            run(executor, text, step)
    assert saved > 0, "no token of the inner draft was ever accepted, so nothing was tested"


@pytest.mark.parametrize("draft", EACH[:4])
def test_its_keys_and_values_are_those_of_a_draft_of_a_target(root, executors, draft):
    """Its keys and values agree for every token of the text, after chunks, plain steps, forced tokens and chains."""
    executor = executors(draft)
    text = [*PROMPTS[2], *prefill(executor, 0, PROMPTS[2], SETTINGS["sampled"], count=160).token_ids]
    steps = [Speculate((0,))] * 2 + [Decode((0,))] * 66 + [Speculate((0,)), "forced"] * 2 + [Decode((0,))]
    for step in steps:
        run(executor, text, step)
    executor.proposed(0, CHAIN)
    as_target = own_target(root, draft)
    prefill(as_target, 0, tuple(text), SETTINGS["greedy"], count=99)
    as_target.proposed(0, INNER[draft][1])
    for name in ("k_pages", "v_pages"):
        found, expected = (
            pages.swapaxes(2, 3).reshape(len(pages), -1, *pages.shape[2::2])[:, : len(text) - 1]
            for pages in (executor.array(f"draft.draft.{name}"), as_target.array(f"draft.{name}"))
        )
        assert expected.any(axis=(0, 2, 3)).all()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_an_inner_draft_that_is_the_small_model_itself_is_always_right(executors):
    """A chain of 7 takes three passes if the inner draft is always right: one, then steps of 4 tokens and of 2."""
    executor = executors("target")
    prefill(executor, 0, PROMPTS[2], SETTINGS["sampled"], count=60)
    for _ in range(8):
        before = executor.num_draft_passes
        executor.submit(Speculate((0,))).wait()
        assert executor.num_draft_passes - before == 3


@pytest.mark.parametrize("draft", ["vllm", "target", None])
@pytest.mark.parametrize("max_context", [64, 70])
def test_up_to_the_last_position_of_the_context(root, executors, draft, max_context):
    """No keys are written past the pages of the slot: its neighbour's text stays what it was."""
    settings = {"max_context": max_context, "max_sequences": 2}
    prompt, other = (PROMPTS[3] * 2)[: max_context - 20], PROMPTS[2]
    both = (executors(draft, **settings), (0,)), (open_with(root, **settings), ("decode",))
    results = [beside_a_neighbour(executor, prompt, other, steps, 20) for executor, steps in both]
    assert results[0] == results[1] and len(results[0][0][0]) == 20


@pytest.mark.parametrize("draft", ["vllm", "target", None])
def test_a_stop_token_inside_a_path_ends_the_sequence(root, executors, draft):
    prompt = PROMPTS[2]
    tokens = generate(open_with(root), prompt, SETTINGS["greedy"])[0][0]
    for stop in dict.fromkeys(tokens):
        (found, _), lengths = generate(executors(draft), prompt, SETTINGS["greedy"], (0,), stop=(stop,))
        assert found == tokens[: tokens.index(stop) + 1]
        assert sum(lengths) == tokens.index(stop)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("draft", ["vllm", None])
def test_eight_sequences_in_a_step_get_what_they_get_alone(root, executors, draft, kv_dtype):
    executor, alone = executors(draft, max_sequences=8, kv_dtype=kv_dtype), open_with(root, kv_dtype=kv_dtype)
    cases = [(PROMPTS[slot % 4], list(SETTINGS.values())[slot % 5], 6 + slot) for slot in range(8)]
    tokens = [
        list(prefill(executor, slot, prompt, sampling, seed=slot, count=wanted).token_ids)
        for slot, (prompt, sampling, wanted) in enumerate(cases)
    ]
    for turn in range(14):
        step = Decode(tuple(range(8))) if turn % 4 == 3 else Speculate(tuple(range(8))[::-1])
        for slot, result in zip(step.slots, executor.submit(step).wait().slots, strict=True):
            tokens[slot] += result.token_ids
    for slot, (prompt, sampling, wanted) in enumerate(cases):
        assert tuple(tokens[slot]) == generate(alone, prompt, sampling, seed=slot, count=wanted)[0][0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("draft", ["model with vllm", "itself with eagle3", "itself with dspark"])
def test_in_16_bits_too(root, draft, dtype):
    with_draft, without = open_with(root, draft, dtype=dtype), open_with(root, dtype=dtype)
    for sampling in (SETTINGS["greedy"], SETTINGS["sampled"]):
        assert generate(with_draft, PROMPTS[2], sampling, (0, 1))[0] == generate(without, PROMPTS[2], sampling)[0]


def test_a_new_sequence_knows_nothing_of_the_one_before(root):
    """A sequence takes as many passes after others in the same slot as it takes in a fresh executor."""
    counts = []
    for before in ((), PROMPTS[1:3]):
        executor = open_small(root, inner("eagle2", TreeShape(2, 4, 6), "vllm"))
        for prompt in before:
            generate(executor, prompt, SETTINGS["sampled"], (0,))
        begun = executor.num_draft_passes
        generate(executor, PROMPTS[3], SETTINGS["greedy"], (0,), count=40)
        counts.append(executor.num_draft_passes - begun)
    assert counts[0] == counts[1]


def test_random_weights(root):
    """With random weights nothing but config.json is read of the target, the small model and its draft."""
    settings = {"load_format": "dummy", "prefill_chunk": 16, "max_context": 128}
    drafted = open_small(root, inner("eagle2", TreeShape(2, 4, 6), "vllm"), (TreeShape.chain(4),), **settings)
    plain = open_with(root, **settings)
    found, lengths = generate(drafted, PROMPTS[1], SETTINGS["greedy"], (0,))
    assert found == generate(plain, PROMPTS[1], SETTINGS["greedy"])[0]
    assert drafted.num_draft_passes >= 2 * len(lengths)


def test_a_plan_needs_no_weights(root, tmp_path):
    """The plan has keys and values of the target, the small model and its draft, by their config.json alone."""
    for source, place in (("target", "target"), ("model", "target/small"), ("vllm", "target/small/draft")):
        (tmp_path / place).mkdir()
        config = json.loads((root / source / "config.json").read_text())
        if source == "vllm":
            config["architectures"] = ["EagleMiniCPMForCausalLM"]
        (tmp_path / place / "config.json").write_text(json.dumps(config))
    folder = ModelFolder.open(tmp_path / "target", weights=False)
    settings, target = EngineConfig("reference", max_context=128), ReferenceTarget()
    parts, alone = (
        described(folder, settings, target, "small", {"num_passes": 3} | wish).plan(128).part_bytes
        for wish in ({"inner": "draft"}, {})
    )
    assert parts["KV pages"] == 3 * alone["draft KV"] and parts["draft KV"] == 2 * alone["draft KV"]
    assert parts["draft"] > alone["draft"] and parts["layers"] == alone["layers"]
