"""Sequences that pause and go on give the same tokens with every draft as without one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from draft_checkpoint import VOCAB, write_all

from cpmrt.config import EngineConfig, Sampling, SpeculationConfig, TreeShape
from cpmrt.engine import Engine, Request, ThinkingBudget, loops
from cpmrt.reference.assembly import open_executor
from cpmrt.weights.model_folder import ModelFolder

TREE, CHAIN = TreeShape(2, 4, 6), TreeShape.chain(3)
DRAFTS = {"vllm": ("eagle2", TREE), "eagle3": ("eagle3", TREE), "target": ("model", CHAIN), "lookup": ("lookup", CHAIN)}
PROMPTS = [(7, 5, 9, 3, 7), tuple(number * number % VOCAB for number in range(70))]
CLOSING = (4, 6, 4)
BUDGET = ThinkingBudget(33, lambda tokens: CLOSING)
GREEDY = Request(PROMPTS[0], Sampling(logprobs=2), 3, (), 70)
REQUESTS = {
    "a closed thought": replace(GREEDY, thinking=BUDGET),
    "a thought that was over": replace(GREEDY, thinking=ThinkingBudget(20, lambda tokens: ())),
    "sampled with penalties": Request(
        PROMPTS[1], Sampling(0.8, 9, 0.9, repetition_penalty=1.3, frequency_penalty=0.2), 3, (), 60, thinking=BUDGET
    ),
    "a raised penalty": replace(GREEDY, loop_repeats=3, loop_penalty=50.0),
    "both": replace(GREEDY, loop_repeats=3, loop_penalty=50.0, thinking=ThinkingBudget(50, lambda tokens: CLOSING)),
}


@pytest.fixture(scope="module", autouse=True)
def short_loops():
    """A setting in which repetitions of 24 tokens already count as loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "LEAST_TOKENS", 24)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("drafts"))


def answers(root, draft, prefix_cache):
    """Run the requests one after the other; return the tokens, log-probabilities and finish reason of each by name."""
    settings = {}
    if draft is not None:
        method, shape = DRAFTS[draft]
        settings["speculation"] = SpeculationConfig(method, shapes=(shape,))
        settings["draft"] = None if method == "lookup" else str(root / draft)
    config = EngineConfig("reference", max_context=256, prefill_chunk=16, memory_budget=1 << 30, **settings)
    executor, _ = open_executor(ModelFolder.open(root / "target"), config)
    engine, found = Engine(executor, prefix_cache=prefix_cache), {}
    for name, request in REQUESTS.items():
        seq = engine.add(request)
        results = list(engine.stream(seq))
        logprobs = [entry for result in results for entry in result.logprobs]
        found[name] = ([token for result in results for token in result.token_ids], logprobs, seq.finish_reason)
    return found


@pytest.fixture(scope="module")
def plain(root):
    return cache(lambda prefix_cache: answers(root, None, prefix_cache))


@pytest.mark.parametrize(("draft", "prefix_cache"), [
    ("vllm", True), ("vllm", False), ("eagle3", True), ("target", False), ("lookup", True),
])  # fmt: skip
def test_drafts_change_nothing(root, plain, draft, prefix_cache):
    assert answers(root, draft, prefix_cache) == plain(prefix_cache)


def test_the_sequences_really_pause(plain):
    found = plain(True)
    whole = found["a thought that was over"][0]
    closed = found["a closed thought"][0]
    assert closed[:33] == whole[:33] and tuple(closed[33:36]) == CLOSING and closed[36:] != whole[36:]
    raised = found["a raised penalty"]
    first = next(index for index, pair in enumerate(zip(raised[0], whole, strict=False)) if pair[0] != pair[1])
    assert first >= 24 and len(set(whole[first - 20 : first + 20])) < len(set(raised[0][first - 20 : first + 20]))
    assert tuple(found["both"][0][50:53]) == CLOSING
