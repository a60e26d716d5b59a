"""A lookup beside a draft with layers: which of the two proposes the drafts, and that no token changes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from draft_checkpoint import write_all
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from reference.test_speculation import open_with
from speculation_steps import SETTINGS, generate, prefill

from cpmrt.config import TreeShape
from cpmrt.executor import Speculate

LENGTH = 9
TREE, BESIDE = TreeShape(3, 3, 8), TreeShape(3, 3, 8, LENGTH)
CHAIN, CHAIN_BESIDE = TreeShape.chain(3), TreeShape(3, 1, 4, LENGTH)
NUMBERS = {
    "vllm": (TREE, BESIDE), "eagle3": (TREE, BESIDE), "itself": (CHAIN, CHAIN_BESIDE),
    "dspark": (CHAIN, CHAIN_BESIDE),
}  # fmt: skip


@pytest.fixture(scope="module")
def executors(tmp_path_factory):
    root = write_all(tmp_path_factory.mktemp("drafts"))
    return cache(lambda draft: open_with(root, draft, draft and NUMBERS[draft]))


def continued(text):
    """Return what followed the last three tokens at their most recent earlier place, or None if there is none."""
    for end in range(len(text) - 2, 1, -1):
        if text[end - 2 : end + 1] == text[-3:]:
            found = list(text[end + 1 :])
            return (found * LENGTH)[:LENGTH]
    return None


@pytest.mark.parametrize("draft", NUMBERS)
@given(prompt=st.lists(st.integers(3, 6), min_size=1, max_size=40).map(tuple), count=st.integers(1, 9))
@examples(25)
def test_a_chain_where_three_tokens_came_before_and_else_the_drafts_own_tree(executors, draft, prompt, count):
    executor, (tree, beside) = executors(draft), NUMBERS[draft]
    text = [*prompt, *prefill(executor, 0, prompt, SETTINGS["sampled"], count=100).token_ids]
    for _ in range(count):
        nodes, found = executor.proposed(0, beside), continued(text)
        if found is None:
            expected = executor.proposed(0, tree)
            for ours, theirs in zip(vars(nodes).values(), vars(expected).values(), strict=True):
                np.testing.assert_array_equal(ours, theirs)
        else:
            assert nodes.tokens.tolist() == [text[-1], *found]
            assert nodes.parents.tolist() == list(range(-1, LENGTH))
        text += executor.submit(Speculate((0,), 1)).wait().slots[0].token_ids


@pytest.mark.parametrize("draft", NUMBERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_text_that_repeats_gives_the_tokens_of_plain_decoding_in_long_steps(executors, draft, name):
    """Tokens are those of plain decoding, also after long chains, when the draft has many tokens to catch up with."""
    prompt, longest = (5, 9, 7, 4) * 8, 0
    plain = generate(executors(None), prompt, SETTINGS[name], count=60)[0]
    for steps in ((1,), (1, "decode", 0)):
        found, lengths = generate(executors(draft), prompt, SETTINGS[name], steps, count=60)
        assert found == plain
        longest = max(longest, *lengths)
    if name == "greedy":
        assert longest == LENGTH + 1


def test_a_draft_that_is_the_target_itself_stays_right_after_chains_of_the_lookup(executors):
    """A draft stays right after a wrong lookup, whose chain has used the positions that the next step drafts for."""
    executor, wrong = executors("itself"), 0
    for seed in range(12):
        prompt = tuple(np.random.default_rng(seed).integers(3, 7, 30).tolist())
        text = [*prompt, *prefill(executor, 0, prompt, SETTINGS["greedy"], count=100).token_ids]
        for _ in range(9):
            is_looked_up = continued(text) is not None
            gained = executor.submit(Speculate((0,), 1)).wait().slots[0].token_ids
            wrong += is_looked_up and len(gained) <= LENGTH
            assert is_looked_up or len(gained) == CHAIN.max_emitted
            text += gained
    assert wrong, "no lookup was ever wrong, so nothing was tested"


def test_the_longest_chain_near_the_end_of_the_context(tmp_path):
    """The last tokens are those of plain decoding: no keys are written past the pages."""
    root, prompt = write_all(tmp_path), (5, 9, 7) * 15
    shapes = (TreeShape(2, 4, 6, 63),)
    with_draft, without = (open_with(root, draft, shapes, max_context=70) for draft in ("vllm", None))
    expected = generate(without, prompt, SETTINGS["greedy"], count=25)
    found, lengths = generate(with_draft, prompt, SETTINGS["greedy"], (0,), count=25)
    assert found == expected[0] and max(lengths) > 6
