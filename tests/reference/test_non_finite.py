"""Logits that are no numbers end their own sequence with an error that says where, and no other."""

from __future__ import annotations

import warnings
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draft_checkpoint import write_all
from reference.tiny_models import MINICPM, make_executor
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.config import EngineConfig, ModelConfig, Sampling, SpeculationConfig, TreeShape
from cpmrt.engine import Engine, Request
from cpmrt.errors import MaskError, NonFiniteLogitsError
from cpmrt.executor import Admit, Decode, Prefill, SlotResult
from cpmrt.reference.assembly import open_executor
from cpmrt.reference.sampling import is_usable
from cpmrt.weights.model_folder import ModelFolder

PROMPT, OTHER = (7, 5, 9, 31, 7), (4, 4, 20)
EVERY_FILTER = Sampling(0.9, 12, 0.9, 0.01, 1.2, 0.3, 0.1, logprobs=3)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def run(engine: Engine, *requests: Request) -> list[tuple[list[int], Exception | None]]:
    """Run all requests together; return the tokens and the error of each."""
    sequences = [engine.add(request) for request in requests]
    found: list[tuple[list[int], Exception | None]] = []
    for seq in sequences:
        tokens: list[int] = []
        error = None
        try:
            for result in engine.stream(seq):
                tokens += result.token_ids
        except (MaskError, NonFiniteLogitsError) as caught:
            error = caught
        found.append((tokens, error))
    return found


@pytest.mark.parametrize(("row", "expected"), [
    ([1.0, -2.0], True), ([3e38, -3e38], True), ([0.0, -INF, -INF], True), ([1.0, NAN], False), ([NAN, 1.0], False),
    ([1.0, INF], False), ([INF, NAN], False), ([-INF, -INF], False),
])  # fmt: skip
def test_which_rows_can_be_sampled(row, expected):
    assert is_usable(np.array(row, np.float32)) is expected


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("sampling", [Sampling(), EVERY_FILTER], ids=["greedy", "every filter"])
def test_a_damaged_weight_is_reported_at_the_first_token(value, sampling):
    executor = make_executor(ModelConfig.from_hf(MINICPM))
    executor.array("norm")[3] = value
    engine = Engine(executor)
    ((tokens, error),) = run(engine, Request(PROMPT, sampling, 0, (), 9))
    assert tokens == []
    assert f"position {len(PROMPT)} " in str(error) and "weights" in str(error) and "float16" in str(error)
    assert engine.is_idle and len(engine.slots.free) == 1


@pytest.mark.parametrize(("row", "bits", "is_mask"), [
    ([1.0, 2.0, -INF], b"\x04", True), ([1.0, 2.0, 3.0], b"\x00", True), ([-INF] * 3, b"\x01", True),
    ([1.0, NAN, 2.0], b"\x01", False), ([INF, 1.0, 2.0], b"\x02", False), ([-INF] * 3, None, False),
])  # fmt: skip
def test_a_mask_that_leaves_nothing_is_no_fault_of_the_logits(row, bits, is_mask):
    executor = make_executor(ModelConfig.from_hf(MINICPM))
    executor.submit(Admit(0, Sampling(), 0, 9, ()))
    executor.submit(Prefill(0, PROMPT, 0, is_last=True)).wait()
    logits = np.full(executor.config.vocab_size, -INF, np.float32)
    logits[:3] = row
    expected = SlotResult(mask_failure="nothing") if is_mask else SlotResult(non_finite=True)
    assert executor._sample(0, logits, bits) == expected
    assert executor.submit(Decode((0,))).wait().slots == (SlotResult(),), "the sequence has ended"


def poisoned(token: int, **settings: Any) -> Engine:
    """Return an engine for a model in which one token's embedding is NaN, and so are the logits after it."""
    executor = make_executor(ModelConfig.from_hf(MINICPM), max_sequences=2, **settings)
    executor.array("embed_tokens")[token] = NAN
    return Engine(executor)


def test_other_sequences_go_on():
    requests = [Request(PROMPT, Sampling(), 0, (), 30), Request(OTHER, Sampling(), 0, (), 30)]
    (whole, _), (other, _) = run(Engine(make_executor(ModelConfig.from_hf(MINICPM), max_sequences=2)), *requests)
    last = next(token for token in whole[2:] if token not in (*PROMPT, *OTHER, *other, *whole[:2]))
    kept = whole[: whole.index(last) + 1]
    engine = poisoned(last)
    (found, error), beside = run(engine, *requests)
    assert found == kept and beside == (other, None)
    assert f"position {len(PROMPT) + len(kept)} " in str(error)
    assert len(engine.slots.free) == 2
    again = run(engine, requests[1], requests[0])
    assert again[0] == (other, None) and again[1][0] == kept, "nothing of it stays behind"


class OneTokenAt:
    """A grammar that allows any tokens, but only `token` at place `place`."""

    is_complete = False

    def __init__(self, place, token):
        self.place, self.token, self.length = place, token, 0

    def prepare(self, others): ...

    def forced(self):
        return []

    def allowed(self):
        return (1 << self.token).to_bytes(16, "little") if self.length == self.place else b"\xff" * 16

    def accept(self, token_ids):
        self.length += len(token_ids)

    def fork(self):
        return copy(self)


def without(token: int, **settings: Any) -> Engine:
    """Return an engine whose executor gives this token the logit -infinity at every position."""
    executor = make_executor(ModelConfig.from_hf(MINICPM), max_sequences=2, **settings)
    forward = executor._forward

    def without_it(rows, chosen, logits):
        forward(rows, chosen, logits)
        logits[:, token] = -INF

    executor._forward = without_it
    return Engine(executor)


@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_mask_that_leaves_nothing_ends_its_own_sequence_alone(place):
    """The sequence keeps its tokens so far, and the other sequences of its steps go on."""
    banned = 21
    free, other = (Request(prompt, Sampling(), 0, (), 30) for prompt in (PROMPT, OTHER))
    (whole, _), beside = run(without(banned), free, other)
    engine = without(banned)
    formed = replace(free, matcher=lambda: OneTokenAt(place, banned))
    (tokens, error), found = run(engine, formed, other)
    assert (tokens, found) == (whole[:place], beside)
    assert isinstance(error, MaskError) and "logit -infinity" in str(error)
    assert engine.is_idle and len(engine.slots.free) == 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("draft", ["vllm", "eagle3", "target", "lookup"])
@pytest.mark.parametrize("sampling", [Sampling(), EVERY_FILTER], ids=["greedy", "every filter"])
def test_drafts_report_it_at_the_same_token(root, draft, sampling):
    method = {"vllm": "eagle2", "eagle3": "eagle3", "target": "model", "lookup": "lookup"}[draft]
    shapes = (TreeShape.chain(3),) if method in ("lookup", "model") else (TreeShape(2, 4, 6),)
    drafting = {
        "speculation": SpeculationConfig(method, shapes=shapes),
        "draft": None if draft == "lookup" else str(root / draft),
    }
    prompt, answers = (7, 5, 9, 3, 7), []
    request = Request(prompt, sampling, 3, (), 40)
    for settings in ({}, drafting):
        engine_config = EngineConfig("reference", max_context=128, memory_budget=1 << 30, **settings)
        executor, _ = open_executor(ModelFolder.open(root / "target"), engine_config)
        if not answers:
            ((whole, _),) = run(Engine(executor), request)
            answers.append(whole)
        token = next(token for token in answers[0][3:] if token not in (*prompt, *answers[0][:3]))
        executor.array("embed_tokens")[token] = NAN
        ((tokens, error),) = run(Engine(executor), request)
        answers.append((tokens, str(error)))
    assert answers[1] == answers[2]
    assert 4 <= len(answers[1][0]) < 40 and "are not finite" in answers[1][1]


def test_the_stream_raises_it_after_its_text(tmp_path):
    with LLM(write_checkpoint(tmp_path, tie_word_embeddings=False), executor="reference") as llm:
        params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2, ignore_eos=True)
        whole = llm.generate([5, 6], params).token_ids
        token = next(token for token in whole[1:] if token not in (5, 6, whole[0]))
        llm.executor.array("embed_tokens")[token] = NAN
        stream = llm.stream([5, 6], params)
        with pytest.raises(NonFiniteLogitsError):
            stream.finish()
        completion = stream.completion
        assert completion.token_ids == whole[: whole.index(token) + 1]
        assert llm.generate([5], SamplingParams(max_new_tokens=1)).token_ids
        with pytest.raises(NonFiniteLogitsError, match="position 1 "):
            llm.score([token, 6, 5])
        assert np.isfinite(llm.score([5, 6, 5])).all()
        for pooling in ("mean", "last"):
            with pytest.raises(NonFiniteLogitsError, match="embedding are not finite"):
                llm.embed([[5, 6], [6, token]], pooling=pooling)
        assert np.isfinite(llm.embed([5, 6])).all()
