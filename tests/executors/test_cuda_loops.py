"""Several steps a launch: the tokens, stops, limits and logprobs of single launches, and the rings stay in step."""

from __future__ import annotations

import pytest

from cpmrt import LLM, SamplingParams
from cpmrt.cuda.precompile import known_device
from cpmrt.errors import ConfigError

PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def push(self", "import os\n\n\ndef walk(", "x = [1, 2, 3]\n")
CHAIN_AND_TREES = {"shapes": [(4, 1, 5), (2, 4, 8)], "adaptive": False}
WISHES = [
    SamplingParams(max_new_tokens=70),
    SamplingParams(max_new_tokens=41, temperature=0.8, top_p=0.9, seed=3, logprobs=2, ignore_eos=True),
    SamplingParams(max_new_tokens=64, repetition_penalty=1.2, frequency_penalty=0.2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def plain():
    with LLM(executor="cuda", max_sequences=4, lm_head_screen=False) as llm:
        yield llm


@pytest.fixture(scope="module", params=[
    {"lm_head_screen": False}, {"draft": "lookup", "speculate": {"shapes": [(4, 1, 5)], "adaptive": False}},
    {"draft": "eagle2", "speculate": CHAIN_AND_TREES}, {"draft": "eagle3"}, {"lm_head_screen": True},
], ids=["plain", "lookup", "eagle2", "adaptive", "screened"])  # fmt: skip
def looping(request):
    with LLM(executor="cuda", max_sequences=4, steps_per_launch=8, **request.param) as llm:
        yield llm


@pytest.fixture
def launches(monkeypatch):
    """A list that fills with the loops that are launched."""
    from cpmrt.cuda.driver.graphs import LoopGraph

    launched, launch = [], LoopGraph.launch
    monkeypatch.setattr(LoopGraph, "launch", lambda self: (launched.append(self), launch(self))[1])
    return launched


def outcome(completion):
    return completion.token_ids, completion.logprobs, completion.finish_reason


@pytest.mark.gpu
@pytest.mark.parametrize("params", WISHES, ids=["greedy", "sampled", "penalties"])
def test_tokens_are_those_of_single_launches(plain, looping, launches, params):
    for prompt in PROMPTS:
        assert outcome(looping.generate(prompt, params)) == outcome(plain.generate(prompt, params))
    assert launches


@pytest.mark.gpu
def test_every_length(plain, looping):
    expected = plain.generate(PROMPTS[0], SamplingParams(max_new_tokens=35, ignore_eos=True)).token_ids
    for count in range(1, 36):
        found = looping.generate(PROMPTS[0], SamplingParams(max_new_tokens=count, ignore_eos=True))
        assert (found.token_ids, found.finish_reason) == (expected[:count], "length")


@pytest.mark.gpu
def test_a_stop_in_the_middle_of_a_launch(plain, looping):
    """After a stop neither the rest of the launch nor the launch behind it gives a token; the next request is right."""
    hot = {"max_new_tokens": 60, "temperature": 1.2, "seed": 5, "ignore_eos": True}
    expected = plain.generate(PROMPTS[1], SamplingParams(**hot)).token_ids
    firsts = [index for index, token in enumerate(expected) if token not in expected[:index]]
    for index in firsts[:24]:
        stopped = looping.generate(PROMPTS[1], SamplingParams(**hot, stop_token_ids=(expected[index],)))
        assert (stopped.token_ids, stopped.finish_reason) == (expected[: index + 1], "stop")


@pytest.mark.gpu
def test_a_cancelled_stream_leaves_the_next_one_alone(plain, looping):
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    for num_pieces in (1, 2, 7, 9):
        stream = looping.stream(PROMPTS[0], params)
        for _ in range(num_pieces):
            next(stream)
        stream.close()
        assert outcome(looping.generate(PROMPTS[2], params)) == outcome(plain.generate(PROMPTS[2], params))


@pytest.mark.gpu
def test_several_sequences_that_come_and_go(plain, looping, launches):
    counts = (9, 60, 33, 17, 48, 5, 70)
    wanted = [
        (PROMPTS[index % 4], SamplingParams(max_new_tokens=count, temperature=0.5 * (index % 3), seed=index))
        for index, count in enumerate(counts)
    ]
    expected = [outcome(plain.generate(*request)) for request in wanted]
    streams = [looping.stream(*request) for request in wanted]
    assert [outcome(stream.finish()) for stream in streams] == expected
    assert launches


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [2, 3, 4, 5, 8])
def test_whole_loops_are_launched(plain, launches, steps):
    params = SamplingParams(max_new_tokens=65, ignore_eos=True)
    with LLM(executor="cuda", steps_per_launch=steps) as llm:
        assert outcome(llm.generate(PROMPTS[0], params)) == outcome(plain.generate(PROMPTS[0], params))
        assert len(launches) == 64 // steps


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{"dependent_launch": False}, {"prefix_cache": False, "dtype": "float16"}], ids=str
)
def test_other_settings(settings):
    params = SamplingParams(max_new_tokens=40, temperature=0.6, seed=2, ignore_eos=True)
    results = []
    for steps in (1, 8):
        with LLM(executor="cuda", draft="lookup", steps_per_launch=steps, **settings) as llm:
            results.append([outcome(llm.generate(prompt, params)) for prompt in PROMPTS])
    assert results[0] == results[1]


def test_a_driver_without_loops_is_refused():
    pytest.importorskip("cupy")
    from cpmrt.cuda.driver.graphs import check_loops

    with pytest.raises(ConfigError, match="inner: the driver has no conditional graph nodes.*, or leave inner out"):
        check_loops(known_device("sm_90"), "speculate: inner", "leave inner out")
