"""Masks on a GPU may come late, rows without one do not wait, and answers keep their forms in any company."""

from __future__ import annotations

import gc
import json
from threading import Timer
from time import perf_counter

import pytest
from form_cases import REGEXES, schemas

from cpmrt import LLM, SamplingParams
from cpmrt.config import Sampling
from cpmrt.executor import Admit, Decode, Mask, Prefill, Release, SlotResult, Speculate, TreeMasks
from cpmrt.weights.model_folder import ModelFolder

jsonschema = pytest.importorskip("jsonschema")  # a GPU machine may have no development tools

pytestmark = pytest.mark.gpu
PROMPT = "Here is the answer: "


def wishes():
    pytest.importorskip("llguidance")
    forms = [{"json_schema": schema} for schema in schemas(20)] + [{"regex": regex} for regex in REGEXES[::12]]
    penalties = [{}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.4, "frequency_penalty": 0.3}, {"logprobs": 2}]
    return [
        SamplingParams(**form, **penalties[seed % 4], temperature=1.0, seed=seed, max_new_tokens=100)
        for seed, form in enumerate(forms)
    ]


def answers_of(*, together=True, **settings):
    params = wishes()
    with LLM(executor="cuda", prefill_chunk=64, max_context=512, **settings) as llm:
        answers = (
            llm.generate([PROMPT] * len(params), params) if together else [llm.generate(PROMPT, one) for one in params]
        )
        return [(answer.token_ids, answer.finish_reason, answer.text) for answer in answers]


@pytest.fixture(scope="module")
def alone():
    """The answers of all wishes, made one after the other."""
    return answers_of(together=False)


def test_answers_keep_their_forms(alone):
    ended = 0
    for params, (_, reason, text) in zip(wishes(), alone, strict=True):
        if params.json_schema is not None and reason == "stop":
            jsonschema.validate(json.loads(text), json.loads(params.json_schema), jsonschema.Draft202012Validator)
            ended += 1
    assert ended > 12


@pytest.mark.parametrize("settings", [
    {"max_sequences": 16}, {"max_sequences": 3}, {"steps_per_launch": 4}, {"cuda_graphs": False},
    {"draft": "eagle2"}, {"draft": "lookup"}, {"draft": "eagle2", "speculate": {"adaptive": False}},
    {"draft": "eagle2", "max_sequences": 3}, {"draft": "eagle2", "cuda_graphs": False},
    {"draft": "eagle2", "speculate": {"lookup": 11}}, {"draft": "lookup", "steps_per_launch": 4},
    {"draft": "eagle2", "speculate": {"lookup": 11, "adaptive": False}}, {"prefix_cache": False},
    {"draft": str(ModelFolder.open(None).path), "speculate": {"num_passes": 5, "inner": "eagle2"}},
], ids=str)  # fmt: skip
def test_company_and_drafts_change_nothing(alone, settings):
    assert [tokens for tokens, *_ in answers_of(**settings)] == [tokens for tokens, *_ in alone]


@pytest.mark.all
def test_300_schemas():
    """At temperature 1 every answer that has ended validates, and is the same among 16 and with drafts."""
    pytest.importorskip("llguidance")
    wanted = schemas(300, seed=1)
    params = [
        SamplingParams(json_schema=schema, temperature=1.0, seed=seed, max_new_tokens=160)
        for seed, schema in enumerate(wanted)
    ]
    found = {}
    for name, together, settings in (
        ("alone", False, {"max_sequences": 16}), ("together", True, {"max_sequences": 16}),
        ("drafted", False, {"max_sequences": 16, "draft": "eagle2"}),
    ):  # fmt: skip
        with LLM(executor="cuda", max_context=512, **settings) as llm:
            groups = [params] if together else [[one] for one in params]
            found[name] = [answer for group in groups for answer in llm.generate([PROMPT] * len(group), group)]
    alone = [answer.token_ids for answer in found["alone"]]
    for name in ("together", "drafted"):
        assert [answer.token_ids for answer in found[name]] == alone, name
    ended = [number for number, answer in enumerate(found["alone"]) if answer.finish_reason == "stop"]
    for number in ended:
        text = found["alone"][number].text
        jsonschema.validate(json.loads(text), wanted[number], jsonschema.Draft202012Validator)
    assert len(ended) > 270


@pytest.mark.parametrize("draft", ["eagle2", "lookup"])
def test_drafts_are_accepted_under_forms(draft):
    """Under forms most steps are drafted ones, and these accept drafts."""
    counts = {"Decode": 0, "Speculate": 0, "tokens": 0}

    def note(step, result):
        if isinstance(step, (Decode, Speculate)):
            counts[type(step).__name__] += 1
            counts["tokens"] += len(result.slots[0].token_ids) * isinstance(step, Speculate)

    answers_of(draft=draft, on_step=note, speculate={"adaptive": False})
    assert counts["Speculate"] > counts["Decode"] and counts["tokens"] > counts["Speculate"], counts


@pytest.mark.parametrize("settings", [{"draft": "eagle2", "speculate": {"adaptive": False}}, {}], ids=str)
def test_garbage_of_an_earlier_model_does_not_hold_up_masks(monkeypatch, settings):
    """Collecting an earlier model between a step and its masks must not block.

    Freeing its memory would wait for the device, which waits for masks that the collecting thread has to find.
    """
    pytest.importorskip("llguidance")
    num_collected = []

    def collecting(give):
        def collect(masks, *args):
            if isinstance(masks, TreeMasks) or masks.on_fill is not None:  # the step has been submitted
                num_collected.append(gc.collect())
            return give(masks, *args)

        return collect

    params = wishes()[:4]
    with LLM(executor="cuda", max_context=512, max_sequences=1, **settings) as llm:
        expected = [llm.generate(PROMPT, one).token_ids for one in params]
        gc.collect()
        gc.disable()
        try:
            other = LLM(executor="cuda", max_context=512, **settings)
            other.generate(PROMPT, SamplingParams(max_new_tokens=3))
            other.close()
            del other
            monkeypatch.setattr(TreeMasks, "of_nodes", collecting(TreeMasks.of_nodes))
            monkeypatch.setattr(Mask, "fill", collecting(Mask.fill))
            begun = perf_counter()
            assert [llm.generate(PROMPT, one).token_ids for one in params] == expected
            assert perf_counter() - begun < 8 and max(num_collected) > 300
        finally:
            gc.enable()


def only(token: int) -> bytes:
    return bytes(token // 8) + bytes([1 << token % 8])


@pytest.fixture(scope="module")
def executor():
    with LLM(executor="cuda", prefill_chunk=64, max_context=512, max_sequences=4) as llm:
        yield llm.executor


def begin(executor, slot, first=None):
    executor.submit(Admit(slot, Sampling(), 3, 60, (2,)))
    mask = None if first is None else Mask(only(first), is_filled=True)
    return executor.submit(Prefill(slot, (5, 6, 7), 0, True, mask)).wait().slots[0].token_ids


def test_a_mask_that_comes_late_is_waited_for(executor):
    assert begin(executor, 0, first=77) == (77,)
    begin(executor, 1)
    empty = Mask()
    pending = executor.submit(Decode((0, 1), (empty, None)))
    timer, begun = Timer(0.2, empty.fill, [only(91)]), perf_counter()
    timer.start()
    slots = pending.wait().slots
    assert slots[0].token_ids == (91,) and len(slots[1].token_ids) == 1
    assert 0.15 < perf_counter() - begun < 2
    free = Mask()
    pending = executor.submit(Decode((0, 1), (free, None)))
    free.fill(None)
    assert all(len(slot.token_ids) == 1 for slot in pending.wait().slots)
    executor.submit(Release(0))
    executor.submit(Release(1))


def test_certain_tokens_count(executor):
    """Certain tokens count towards the length of the answer, here beside a slot whose mask comes late."""
    begin(executor, 1)
    executor.submit(Admit(0, Sampling(), 3, 5, (2,)))
    executor.submit(Prefill(0, (5, 6, 7), 0, True, Mask(only(40), is_filled=True))).wait()
    late = Mask()
    pending = executor.submit(Decode((1, 0), (late, Mask(only(44), is_filled=True)), ((), (41, 42))))
    late.fill(only(91))
    assert [slot.token_ids for slot in pending.wait().slots] == [(91,), (41, 42, 44)]
    assert len(executor.submit(Decode((0,))).wait().slots[0].token_ids) == 1
    assert executor.submit(Decode((0,), certain=((7, 8),))).wait().slots[0].token_ids == (), "five tokens were wanted"
    executor.submit(Release(0))
    executor.submit(Release(1))


def test_a_mask_that_never_comes_is_an_error(executor):
    begin(executor, 0)
    begin(executor, 1)
    pending = executor.submit(Decode((0, 1), (Mask(), None)))
    late, beside = pending.wait().slots
    assert late == SlotResult(mask_failure="late") and len(beside.token_ids) == 1
    assert executor.submit(Decode((0,))).wait().slots == (SlotResult(),), "it has ended"
    assert executor.submit(Decode((1,))).wait().slots[0].token_ids, "the other sequence goes on"
    executor.submit(Release(0))
    executor.submit(Release(1))


def test_a_reading_beside_answers_under_forms():
    """Scoring beside answers under forms waits for the device only when no step waits for its mask."""
    pytest.importorskip("llguidance")
    with LLM(executor="cuda", prefill_chunk=64, max_context=512, max_sequences=4) as llm:
        params = [one for one in wishes() if one.json_schema is not None][:3]
        streams = [llm.stream(PROMPT, one) for one in params]
        for stream in streams:
            next(stream)
        begun = perf_counter()
        for _ in range(5):
            llm.score("def read_lines(path):")
            llm.generate("x" * 50, SamplingParams(max_new_tokens=3))
        for stream in streams:
            stream.finish()
        assert perf_counter() - begun < 8
