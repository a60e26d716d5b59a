"""LLM with drafts: any draft gives the tokens without one, and settings that cannot go together are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.errors import CheckpointError, ConfigError
from cpmrt.executor import Decode, Speculate

PROMPT = "one two one two one two one two one"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model whose folder holds a smaller model, and the model itself again, in folders of their own."""
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    write_checkpoint(folder / "small", num_hidden_layers=1)
    write_checkpoint(folder / "itself")
    return folder


def run(checkpoint, steps=None, **settings):
    on_step = None if steps is None else lambda step, _: steps.append(step)
    params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=4, ignore_eos=True)
    with LLM(checkpoint, executor="reference", max_context=128, on_step=on_step, **settings) as llm:
        return llm.generate(PROMPT, params)


@pytest.mark.parametrize("settings", [
    {"draft": "lookup"},
    {"speculate": {"method": "lookup", "num_passes": 4}},
    {"draft": "small"},
    {"draft": "small", "speculate": {"shapes": [(6, 1, 7), (2, 1, 3)], "adaptive": False}},
    {"draft": "small", "speculate": {"num_passes": 6, "inner": "lookup"}},
    {"draft": "small", "speculate": {"inner": {"draft": "../itself", "num_passes": 2}}},
], ids=str)  # fmt: skip
def test_a_draft_changes_no_token(checkpoint, settings):
    plain, drafted = run(checkpoint), run(checkpoint, **settings)
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
    assert plain.stats.mean_accept_length is None and drafted.stats.mean_accept_length >= 1


def test_a_draft_that_is_the_model_itself_is_always_right(checkpoint):
    """With greedy decoding every token is accepted if the draft is the model itself."""
    params = SamplingParams(max_new_tokens=25, ignore_eos=True)
    with LLM(checkpoint, executor="reference", draft=checkpoint / "itself", speculate={"num_passes": 3}) as llm:
        stats = llm.generate(PROMPT, params).stats
    assert stats.accept_histogram == (0, 0, 0, 6) and stats.accept_rates == (1.0, 1.0, 1.0)
    assert stats.mean_accept_length == 4


@pytest.mark.parametrize("wishes", [{}, {"inner": "lookup"}], ids=str)
def test_no_token_comes_after_the_one_that_completes_a_stop_string(checkpoint, wishes):
    """No token follows a stop string, in whichever place of a step of four tokens it ends, or across two steps."""
    draft = {"draft": checkpoint / "itself", "speculate": {"num_passes": 3, "adaptive": False} | wishes}
    params = SamplingParams(max_new_tokens=25, logprobs=1, ignore_eos=True)
    with LLM(checkpoint, executor="reference") as plain, LLM(checkpoint, executor="reference", **draft) as drafted:
        free = plain.generate(PROMPT, params)
        decode, lengths = plain.tokenizer.decode, set()
        for start in range(len(free.text)):
            for stop in {free.text[start], free.text[start : start + 3]} - {"\ufffd"}:
                answers = [llm.generate(PROMPT, replace(params, stop=(stop,))) for llm in (plain, drafted)]
                assert answers[0].token_ids == answers[1].token_ids == free.token_ids[: len(answers[0].token_ids)]
                for answer in answers:
                    shorter = decode(answer.token_ids[:-1])
                    assert stop in decode(answer.token_ids) and stop not in shorter and answer.finish_reason == "stop"
                    assert len(answer.logprobs) == answer.stats.new_tokens == len(answer.token_ids)
                    assert answer.text == free.text[: free.text.index(stop)]
                stats = answers[1].stats
                assert stats.speculative_tokens == stats.new_tokens - 1
                lengths.add(stats.new_tokens % 4)
    assert lengths == {0, 1, 2, 3}


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("draft", "wishes"), [
    ("small", {}), ("itself", {}), ("itself", {"lookup": 6}), ("lookup", {"num_passes": 5}),
    ("itself", {"inner": {"draft": "lookup", "num_passes": 2}}),
])  # fmt: skip
def test_several_prompts_together_are_drafted_for(checkpoint, draft, wishes, kv_dtype):
    """Several prompts are drafted for together, each with its own stop string, penalties, logprobs and length."""
    prompts = [PROMPT, "two two", "one two one", "a b a b a b", "two one two one"]
    params = [
        SamplingParams(max_new_tokens=9 + 5 * number, temperature=0.7 * (number % 2), seed=number, ignore_eos=True,
                       logprobs=number, repetition_penalty=1 + 0.1 * (number % 3), stop=("one",) * (number == 3))
        for number in range(5)
    ]  # fmt: skip
    steps, answers = [], []
    drafting = {"draft": draft, "speculate": wishes, "on_step": lambda step, _: steps.append(step)}
    for settings in ({}, drafting):
        shared = {"executor": "reference", "max_context": 128, "max_sequences": 4, "kv_dtype": kv_dtype}
        with LLM(checkpoint, **shared, **settings) as llm:
            found = llm.generate(prompts, params)
            answers.append([(one.token_ids, one.text, one.logprobs, one.finish_reason) for one in found])
    assert answers[0] == answers[1]
    assert max(len(step.slots) for step in steps if isinstance(step, Speculate)) == 4


def test_off_leaves_the_draft_out(checkpoint):
    steps = []
    run(checkpoint, steps, draft="small", speculate="off")
    assert any(isinstance(step, Decode) for step in steps) and not any(isinstance(step, Speculate) for step in steps)


@pytest.mark.parametrize(("settings", "error", "says"), [
    ({"draft": "absent"}, CheckpointError, "absent"),
    ({"draft": "small", "speculate": {"method": "lookup"}}, ConfigError, "expected model, as the draft is"),
    ({"draft": "small", "speculate": {"window": 64}}, ConfigError, "window means nothing to method model"),
    ({"speculate": {"num_passes": 3}}, ConfigError, "speculate needs a draft"),
    ({"speculate": "yes"}, ConfigError, "auto | off | an object"),
    ({"speculate": {"simulate_accept": 2.0}}, ConfigError, "speculate needs a draft"),
    ({"draft": "lookup", "speculate": {"simulate_accept": 2.0}}, ConfigError, "NumPy"),
    ({"draft": "small", "speculate": {"inner": "absent"}}, CheckpointError, "draft 'absent'"),
    ({"draft": "lookup", "speculate": {"inner": "small"}}, ConfigError, "inner means nothing to method lookup"),
], ids=str)  # fmt: skip
def test_what_cannot_be(checkpoint, settings, error, says):
    with pytest.raises(error, match=says):
        run(checkpoint, **settings)
