"""Speculation gives what plain decoding gives, to the bit: any draft, any settings, any mix of steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from draft_checkpoint import VOCAB, write_all
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from speculation_steps import SETTINGS, beside_a_neighbour, generate, joined, prefill, together

from cpmrt.config import EngineConfig, SpeculationConfig, TreeShape
from cpmrt.config.speculation import InnerDraft
from cpmrt.executor import Admit, Decode, SlotResult, Speculate
from cpmrt.reference.assembly import open_executor
from cpmrt.weights.model_folder import ModelFolder

TREES = (TreeShape(2, 4, 6), TreeShape(3, 2, 8), TreeShape(1, 4, 5), TreeShape.chain(3), TreeShape(4, 2, 9))
CHAINS = (TreeShape.chain(4), TreeShape.chain(1), TreeShape(3, 1, 3))


def inner(method, shape, name=None, **wishes):
    """Return the setting of a small model's own draft; `name` is a folder of `write_all` beside the small model's."""
    return {"inner": InnerDraft(name and f"../{name}", SpeculationConfig(method, (shape,), **wishes))}


DRAFTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "vllm": ("vllm", {}),
    "cpmcu": ("cpmcu", {"window": 5}),
    "classic": ("classic", {}),
    "frequent": ("frequent", {}),
    "head 8": ("vllm", {"head_bits": 8}),
    "frequent head 4": ("frequent", {"head_bits": 4, "draft_vocab": 12}),
    "chain of vllm": ("of vllm", {"shapes": (TreeShape.chain(4), TreeShape(2, 4, 6), TreeShape.chain(2))}),
    "chain of vllm head 4": ("of vllm", {"shapes": (TreeShape.chain(4),), "head_bits": 4, "draft_vocab": VOCAB}),
    "eagle3": ("eagle3", {"window": 20}),
    "eagle3 head 8": ("eagle3", {"head_bits": 8}),
    "dspark": ("dspark", {}),
    "dspark head 8": ("dspark", {"head_bits": 8, "min_confidence": 0.2}),
    "dspark layers 4": ("dspark", {"layer_bits": 4}),
    "frequent dspark": ("frequent dspark", {}),
    "frequent dspark head 4": ("frequent dspark", {"head_bits": 4, "draft_vocab": 12}),
    "model": ("model", {}),
    "itself": ("target", {}),
    "lookup": (None, {}),
    "vllm or lookup": ("vllm", {"shapes": (TreeShape(2, 4, 6, 4), TreeShape(3, 2, 8, 11))}),
    "eagle3 or lookup": ("eagle3", {"shapes": (TreeShape(2, 4, 6, 9), TreeShape.chain(3))}),
    "model or lookup": ("model", {"shapes": (TreeShape(3, 1, 4, 8), TreeShape(1, 1, 2, 1))}),
    "model with vllm": ("model", inner("eagle2", TreeShape(2, 4, 6), "vllm")),
    "model with frequent": ("model", inner("eagle2", TreeShape(2, 4, 6), "frequent", head_bits=4, draft_vocab=12)),
    "model head 8 with lookup": ("model", {"head_bits": 8} | inner("lookup", TreeShape.chain(3))),
    "itself with eagle3": ("target", inner("eagle3", TreeShape(3, 2, 8, 5), "eagle3", window=20)),
    "itself with dspark": ("target", inner("dspark", TreeShape.chain(4), "dspark")),
    "itself with model": ("target", inner("model", TreeShape.chain(2), "model")),
}
RANDOM = np.random.default_rng(11)
PROMPTS = [tuple(RANDOM.integers(3, VOCAB, count).tolist()) for count in (1, 7, 17, 40, 70)]
METHODS = {
    "eagle3": "eagle3", "dspark": "dspark", "frequent dspark": "dspark", "model": "model", "target": "model",
    None: "lookup",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("drafts"))


def open_with(root, draft=None, shapes=None, sparse="auto", **settings):
    """Return a reference executor of the target with one of DRAFTS (None: without a draft)."""
    engine = {"executor": "reference", "prefill_chunk": 16, "max_context": 256, "memory_budget": 1 << 30} | settings
    if draft is not None:
        name, wishes = DRAFTS[draft]
        method = METHODS.get(name, "eagle2")
        shapes = shapes or (TREES if method.startswith("eagle") else CHAINS)
        engine["speculation"] = SpeculationConfig(method, **{"shapes": shapes} | wishes)
        engine["draft"] = None if name is None else str(root / name)
    folder = ModelFolder.open(root / "target", sparse=sparse)
    return open_executor(folder, EngineConfig(**engine))[0]


@pytest.fixture(scope="module")
def plain(root):
    """A function that returns what plain decoding gives for a prompt and settings."""
    executor = open_with(root)

    @cache
    def expected(prompt, name, stop=(), count=12):
        return generate(executor, prompt, SETTINGS[name], stop=stop, count=count)[0]

    return expected


@pytest.mark.parametrize("draft", DRAFTS)
def test_tokens_and_logprobs_are_those_of_plain_decoding(root, plain, draft):
    """Tokens and logprobs are those of plain decoding in over 200 pairs of prompts and settings over all drafts."""
    executor = open_with(root, draft)
    num_shapes, accepted, case = len(executor.limits.tree_shapes), [], 0
    for prompt in PROMPTS[3:] if "head" in draft or "with" in draft else PROMPTS:
        for name, sampling in SETTINGS.items():
            mixed = (*range(num_shapes), "decode") if case % 3 else (case % num_shapes,)
            found, lengths = generate(executor, prompt, sampling, mixed)
            assert found == plain(prompt, name), (prompt, name, mixed)
            accepted += lengths
            case += 1
    assert np.mean(accepted) > 1.02, "no draft was ever accepted, so nothing was tested"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("draft", ["vllm", "eagle3", "dspark", "model"])
def test_in_16_bits_too(root, draft, dtype):
    with_draft, without = open_with(root, draft, dtype=dtype), open_with(root, dtype=dtype)
    for prompt in PROMPTS[1:4]:
        for sampling in (SETTINGS["greedy"], SETTINGS["sampled"]):
            assert generate(with_draft, prompt, sampling, (0, 1))[0] == generate(without, prompt, sampling)[0]


@given(
    draft=st.sampled_from(["vllm", "eagle3", "dspark", "model", "lookup"]),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50).map(tuple),
    name=st.sampled_from(list(SETTINGS)),
    steps=st.lists(st.sampled_from(["decode", 0, 1, 2]), min_size=1, max_size=6),
    stop=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    count=st.integers(1, 20),
)
@examples(25)
def test_any_mix_of_steps(executors, plain, draft, prompt, name, steps, stop, count):
    found = generate(executors(draft), prompt, SETTINGS[name], steps, stop=stop, count=count)[0]
    assert found == plain(prompt, name, stop, count)


@pytest.fixture(scope="module")
def executors(root):
    return cache(lambda draft: open_with(root, draft))


def test_a_draft_that_is_the_target_itself_is_always_right(root, plain):
    """Every drafted token is accepted, as the draft's pages and positions are those of the target."""
    executor = open_with(root, "itself")
    for prompt in PROMPTS:
        found, lengths = generate(executor, prompt, SETTINGS["greedy"], (0,), count=11)
        assert lengths == [5, 5]
        assert found[0] == plain(prompt, "greedy")[0][:11]


def test_lookup_finds_a_text_that_repeats(root):
    """Whole chains of a lookup are accepted where the target repeats itself."""
    executor, period = open_with(root, "lookup"), (5, 9, 7)
    found, _ = generate(open_with(root), period * 8, SETTINGS["greedy"], count=60)
    again, lengths = generate(executor, period * 8, SETTINGS["greedy"], (0,), count=60)
    assert again == found
    assert len(set(found[0][30:])) < 12 and max(lengths) == 5


@pytest.mark.parametrize("draft", ["vllm", "eagle3", "dspark", "itself", "lookup"])
def test_a_stop_token_inside_a_path_ends_the_sequence(root, plain, draft):
    """No token follows a stop token, however much of the path was right, and later steps give nothing."""
    executor, prompt = open_with(root, draft), PROMPTS[2]
    tokens = plain(prompt, "greedy")[0]
    for stop in dict.fromkeys(tokens):
        first = tokens.index(stop)
        (found, _), lengths = generate(executor, prompt, SETTINGS["greedy"], (0,), stop=(stop,))
        assert found == tokens[: first + 1]
        assert sum(lengths) == first


@pytest.mark.parametrize("draft", ["vllm", "dspark", "itself"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_no_token_beyond_the_limit(root, plain, draft, count):
    executor = open_with(root, draft)
    (found, _), _ = generate(executor, PROMPTS[1], SETTINGS["greedy"], (0,), count=count)
    assert found == plain(PROMPTS[1], "greedy")[0][:count]
    assert executor.submit(Admit(0, SETTINGS["greedy"], 1, 1, ())).wait().slots == ()


@pytest.mark.parametrize("draft", ["vllm", "eagle3", "dspark", "itself", "lookup"])
@pytest.mark.parametrize("max_context", [64, 70])
def test_up_to_the_last_position_of_the_context(root, draft, max_context):
    """No keys are written past a slot's pages: its neighbour's tokens are those without a draft."""
    settings = {"max_context": max_context, "max_sequences": 2}
    with_draft, without = open_with(root, draft, **settings), open_with(root, **settings)
    prompt, other = (PROMPTS[4] * 2)[: max_context - 20], PROMPTS[2]
    count, both = max_context - len(prompt), ((with_draft, (0, 1)), (without, ("decode",)))
    results = [beside_a_neighbour(executor, prompt, other, steps, count) for executor, steps in both]
    assert results[0] == results[1]
    assert len(results[0][0][0]) == count


def test_a_short_block_table_bounds_the_tree(root, plain):
    """A tree that reaches past the pages of a short block table is cut, not written elsewhere."""
    executor = open_with(root, "vllm", max_sequences=2)
    prompt = PROMPTS[3]
    neighbour = [prefill(executor, 1, PROMPTS[4], SETTINGS["greedy"], table=(1, 2))]
    found, _ = generate(executor, prompt, SETTINGS["greedy"], (4, 1), table=(5,))
    assert found == plain(prompt, "greedy")
    neighbour += [executor.submit(Decode((1,))).wait().slots[0] for _ in range(11)]
    assert joined(neighbour) == plain(PROMPTS[4], "greedy")


@pytest.mark.parametrize("draft", ["vllm", "eagle3", "dspark", "model", "lookup"])
def test_a_prompt_whose_beginning_is_in_the_pages(root, plain, draft):
    executor, prompt = open_with(root, draft), PROMPTS[4]
    for name, sampling in SETTINGS.items():
        generate(executor, prompt, sampling, (0,))
        found, _ = generate(executor, prompt, sampling, (0, 1), start=64)
        assert found == plain(prompt, name)


@pytest.mark.parametrize("draft", ["vllm", "eagle3", "dspark", "itself"])
def test_many_plain_steps_between(root, draft):
    """A draft is as good as before after more plain tokens than it keeps hidden states of."""
    executor, prompt, greedy = open_with(root, draft), PROMPTS[1], SETTINGS["greedy"]
    expected = generate(open_with(root), prompt, greedy, count=200)[0][0]
    for num_plain in (64, 130):
        tokens = list(prefill(executor, 0, prompt, greedy, count=200).token_ids)
        for step in [Decode((0,))] * num_plain + [Speculate((0,), 0)] * 4:
            (result,) = executor.submit(step).wait().slots
            tokens += result.token_ids
        assert tuple(tokens) == expected[: len(tokens)]
        if draft == "itself":
            assert len(tokens) == 1 + num_plain + 4 * 5


@pytest.mark.parametrize("draft", ["eagle3", "dspark"])
def test_two_slots_are_drafted_for_in_turn(root, plain, draft):
    executor = open_with(root, draft, max_sequences=2)
    results = [[prefill(executor, slot, PROMPTS[slot + 2], SETTINGS["sampled"])] for slot in range(2)]
    for turn in range(30):
        if turn % 5 == 4:
            for slot, result in enumerate(executor.submit(Decode((0, 1))).wait().slots):
                results[slot].append(result)
        else:
            results[turn % 2] += executor.submit(Speculate((turn % 2,), turn % 3)).wait().slots
    for slot in range(2):
        assert joined(results[slot]) == plain(PROMPTS[slot + 2], "sampled")


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("draft", ["vllm", "eagle3 or lookup", "model", "lookup"])
@pytest.mark.parametrize("count", [2, 8])
def test_several_sequences_in_a_step_get_what_they_get_alone(root, draft, kv_dtype, count):
    """Each sequence has settings of its own and gets what it gets alone; others go on when one ends."""
    executor = open_with(root, draft, max_sequences=count, kv_dtype=kv_dtype)
    alone = open_with(root, kv_dtype=kv_dtype)
    cases = [(PROMPTS[1 + slot % 4], list(SETTINGS.values())[slot % 5], 8 + 2 * slot) for slot in range(count)]
    assert set(executor.limits.max_drafting) == {8}
    results = together(executor, cases, (0, 1, 0, "decode"))
    for slot, (prompt, sampling, wanted) in enumerate(cases):
        expected, _ = generate(alone, prompt, sampling, seed=slot, count=wanted)
        assert results[slot][0] == expected and len(expected[0]) == wanted


def test_the_largest_trees(root, plain):
    """Trees of the largest sizes change no token: 64 nodes, 64 drafted rows behind the text, 32 candidates a row."""
    shapes = (TreeShape(9, 8, 64), TreeShape(32, 2, 64), TreeShape(2, 16, 64))
    executor = open_with(root, "eagle3", shapes=shapes)
    for prompt in PROMPTS[1::2]:
        for shape in range(len(shapes)):
            found, _ = generate(executor, prompt, SETTINGS["sampled"], (shape,))
            assert found == plain(prompt, "sampled")


@pytest.mark.parametrize("use_nope", [False, True])
def test_a_target_with_sparse_attention(root, use_nope):
    """Compressed keys of windows that end within an accepted path are those of plain decoding too."""
    sparse = {"topk": 3, "window_size": 64, "init_blocks": 1, "dense_len": -1, "use_nope": use_nope}
    prompt = tuple(np.random.default_rng(8).integers(3, VOCAB, 350).tolist())
    settings, count = {"max_context": 512, "prefill_chunk": 128, "sparse": sparse}, 52
    draft, name, steps = ("eagle3", "sampled", (0, 1, "decode")) if use_nope else ("itself", "greedy", (0,))
    without, with_draft = open_with(root, **settings), open_with(root, draft, **settings)
    expected = generate(without, prompt, SETTINGS[name], count=count)[0]
    found, lengths = generate(with_draft, prompt, SETTINGS[name], steps, count=count)
    assert found == expected and max(lengths) > 1
    for name, stride in (("k1_pages", 16), ("k2_pages", 64)):
        pages = [executor.array(name) for executor in (without, with_draft)]
        of_all = [array.reshape(*array.shape[:3], -1, array.shape[-1]).swapaxes(2, 3) for array in pages]
        entries = [array.reshape(len(array), -1, *array.shape[3:]) for array in of_all]
        num_ended = (350 + count - 1) // stride
        assert entries[0][:, 1:num_ended].all(axis=(0, 2, 3)).all()
        np.testing.assert_array_equal(entries[0][:, 1:num_ended], entries[1][:, 1:num_ended])


def test_a_finished_sequence_takes_no_part(root):
    executor = open_with(root, "vllm")
    prefill(executor, 0, PROMPTS[1], SETTINGS["greedy"], count=1)
    assert executor.submit(Speculate((0,))).wait().slots == (SlotResult(),)
