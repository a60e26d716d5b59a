"""The CUDA executor against the reference: the same models, sampling and state machine."""

import json
from pathlib import Path

import numpy as np
import pytest
from executors.cuda_models import BASE, ROWS, write_model
from reference.golden_models import relative, typical

from cpmrt import LLM, SamplingParams
from cpmrt.engine.step_log import replay

pytestmark = pytest.mark.gpu

SAMPLED = SamplingParams(max_new_tokens=48, temperature=0.9, top_p=0.95, top_k=40, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module", params=list(ROWS))
def checkpoint(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), BASE | ROWS[request.param])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_those_of_the_reference(checkpoint, dtype):
    settings = {"dtype": dtype, "max_context": 320}
    with LLM(checkpoint, executor="reference", **settings) as reference, LLM(
        checkpoint, executor="cuda", prefill_chunk=128, **settings
    ) as llm:  # fmt: skip
        for length in (1, 5, 64, 65, 130, 300):
            ids = np.random.default_rng(length).integers(3, 99, length).tolist()
            actual = llm.logits(ids)
            assert np.isfinite(actual).all(), length
            error = typical if "experts" in checkpoint.name else relative
            assert error(actual, reference.logits(ids)) < (3e-2 if dtype == "bfloat16" else 5e-3), length


def test_one_sequence_alone_has_its_head_run_for_64_rows_at_a_time(tmp_path, monkeypatch):
    with LLM(write_model(tmp_path, BASE | ROWS["llama"]), executor="cuda", max_sequences=1, prefill_chunk=128) as llm:
        counts, head = [], llm.executor._forward.head
        monkeypatch.setattr(llm.executor._forward, "head", lambda out, x: (counts.append(len(x)), head(out, x)))
        ids = [3 + i % 90 for i in range(200)]
        whole = llm.logits(ids)
        assert counts == [64, 64, 64, 64]
        np.testing.assert_array_equal(llm.logits(ids[:100]), whole[:100])  # the rows of padding do not matter


@pytest.mark.parametrize("settings", [
    {"cuda_graphs": False}, {"dependent_launch": False}, {"cuda_graphs": False, "dependent_launch": False},
])  # fmt: skip
def test_graphs_and_dependent_launches_do_not_change_a_bit(checkpoint, settings):
    prompt = list(range(5, 98))
    with LLM(checkpoint, executor="cuda") as llm:
        expected = [llm.generate(prompt, params).token_ids for params in (SAMPLED, GREEDY)]
    with LLM(checkpoint, executor="cuda", **settings) as llm:
        assert [llm.generate(prompt, params).token_ids for params in (SAMPLED, GREEDY)] == expected


def test_a_request_gives_the_same_tokens_alone_and_under_load(checkpoint):
    prompts = [list(range(3 + i, 40 + 7 * i)) for i in range(5)]
    with LLM(checkpoint, executor="cuda", max_sequences=8) as llm:
        alone = [llm.generate(prompt, SAMPLED).token_ids for prompt in prompts]
        streams = [llm.stream(prompt, SAMPLED) for prompt in prompts]
        together = [stream.finish().token_ids for stream in streams]
    assert together == alone


@pytest.fixture(scope="module")
def demo():
    with LLM(executor="cuda") as llm:
        yield llm


@pytest.fixture(scope="module")
def reference_demo():
    with LLM(executor="reference") as llm:
        yield llm


def test_the_demo_model_answers(demo):
    out = demo.chat([{"role": "user", "content": "What does os.path.join do?"}], SamplingParams(max_new_tokens=80))
    assert "Join two or more pathname components" in out.text and out.finish_reason == "stop"


def test_demo_greedy_tokens_are_the_best_or_tied_with_it(demo, reference_demo):
    for prompt in ("def read_lines(path):", "import os\n\nclass Stack:", "x" * 300):
        out = demo.generate(prompt, SamplingParams(max_new_tokens=100, ignore_eos=True))
        ids = demo.tokenizer.encode(prompt)
        logits = reference_demo.logits([*ids, *out.token_ids])[len(ids) - 1 : -1]
        chosen = logits[np.arange(len(out.token_ids)), list(out.token_ids)]
        assert (logits.max(1) - chosen < 0.25).all()
        assert (logits.argmax(1) == list(out.token_ids)).mean() > 0.95


def test_demo_scores(demo, reference_demo):
    ids = demo.tokenizer.encode(Path(json.__file__).read_text())[:2000]
    np.testing.assert_allclose(demo.score(ids).mean(), reference_demo.score(ids).mean(), atol=5e-3)


def test_logprobs_match_the_reference(demo, reference_demo):
    params = SamplingParams(max_new_tokens=8, logprobs=5)
    ours = demo.generate("def main():", params)
    theirs = reference_demo.score([*demo.tokenizer.encode("def main():"), *ours.token_ids])[-8:]
    np.testing.assert_allclose([entry.logprob for entry in ours.logprobs], theirs, atol=0.1)
    assert all(entry.top[0][0] == entry.token_id and len(entry.top) == 5 for entry in ours.logprobs)


def test_a_logit_bias_forces_and_bans(demo):
    prompt, free = "def main():", SamplingParams(max_new_tokens=8, ignore_eos=True)
    first = demo.generate(prompt, free).token_ids[0]
    forced = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3, ignore_eos=True, logit_bias={70: 100})
    assert demo.generate(prompt, forced).token_ids == (70,) * 8
    banned = SamplingParams(max_new_tokens=8, ignore_eos=True, logit_bias={first: -100})
    assert first not in demo.generate(prompt, banned).token_ids
    assert demo.generate(prompt, free).token_ids[0] == first, "the slot's next sequence has none"


def test_a_step_log_replays(demo):
    steps = []
    with LLM(executor="cuda", on_step=lambda *record: steps.append(record)) as llm:
        llm.generate("def f(", SAMPLED)
    with LLM(executor="cuda") as llm:
        assert list(replay([step for step, _ in steps], llm.executor)) == steps


PROMPTS = ("import ", "def read_lines(path):", "class Stack:\n", "x = [1, 2, 3]\n")


def ten_thousand_tokens(**settings):
    """Return 2,500 greedy and 2,500 sampled tokens for each prompt, from eight sequences that run together."""
    greedy = SamplingParams(max_new_tokens=2500, ignore_eos=True)
    hot = [SamplingParams(max_new_tokens=2500, temperature=1.0, top_p=0.98, seed=s, ignore_eos=True) for s in range(4)]
    requests = [*((prompt, greedy) for prompt in PROMPTS), *zip(PROMPTS, hot, strict=True)]
    with LLM(executor="cuda", max_sequences=8, max_context=2560, **settings) as llm:
        streams = [llm.stream(*request) for request in requests]
        return [stream.finish().token_ids for stream in streams]


def test_ten_thousand_tokens_without_drift():
    """Greedy and sampled tokens are the same without graphs and without dependent launches."""
    expected = ten_thousand_tokens()
    assert [sum(map(len, tokens)) for tokens in (expected[:4], expected[4:])] == [10_000, 10_000]
    assert len({tuple(tokens[-100:]) for tokens in expected[4:]}) == 4
    for settings in ({"cuda_graphs": False}, {"dependent_launch": False}):
        assert ten_thousand_tokens(**settings) == expected, settings


@pytest.mark.all
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False, "dependent_launch": False}], ids=["graphs", "eager"])
def test_ten_thousand_tokens_alone_are_those_under_load(settings):
    expected = ten_thousand_tokens()
    params = [SamplingParams(max_new_tokens=2500, ignore_eos=True)]
    params.append(SamplingParams(max_new_tokens=2500, temperature=1.0, top_p=0.98, seed=0, ignore_eos=True))
    with LLM(executor="cuda", max_context=2560, **settings) as llm:
        assert [llm.generate(PROMPTS[0], wanted).token_ids for wanted in params] == [expected[0], expected[4]]


@pytest.mark.alone
def test_closing_frees_the_device():
    cupy = pytest.importorskip("cupy")
    with LLM(executor="cuda") as warm:
        warm.generate("x", GREEDY)
    before = cupy.cuda.runtime.memGetInfo()[0]
    llm = LLM(executor="cuda")
    llm.generate("x", GREEDY)
    assert cupy.cuda.runtime.memGetInfo()[0] <= before - llm.plan.total_bytes + (4 << 20)
    llm.close()
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (8 << 20)
