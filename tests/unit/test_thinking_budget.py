"""A thought that has used up its budget is closed by the model's own marker, and the answer goes on behind it."""

from __future__ import annotations

import json

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted import TREE_SHAPES, next_token
from tiny_checkpoint import write_checkpoint
from unit.test_prefix_cache import PagedExecutor, paged_limits

from cpmrt import LLM, SamplingParams
from cpmrt.config import Sampling
from cpmrt.engine import Engine, Request, ThinkingBudget
from cpmrt.errors import NonFiniteLogitsError, RequestError
from cpmrt.executor import Admit, SlotResult
from cpmrt.text import ChatTemplate
from cpmrt.text.thinking import closing_text, open_marker

CLOSING = (40, 41, 42)


def closing_ids(token_ids):
    """Return the closing tokens of a thought, which counts as open unless it holds a 7."""
    return () if 7 in token_ids else CLOSING


def expected(prompt, new, stops, budget):
    """Return the tokens by definition: sampled, with closing tokens after `budget` tokens in an open thought."""
    tokens = []
    while len(tokens) < new:
        tokens.append(next_token([*prompt, *tokens], 5))
        if tokens[-1] in stops:
            break
        if len(tokens) == budget:
            for token in closing_ids(tokens)[: new - len(tokens)]:
                tokens.append(token)
                if token in stops:
                    return tokens
    return tokens


LIMITS = st.builds(
    paged_limits,
    max_sequences=st.integers(1, 3),
    max_context=st.just(64),
    prefill_chunk=st.integers(1, 9),
    run_ahead=st.integers(1, 4),
    tree_shapes=st.sampled_from([(), *TREE_SHAPES]),
    num_snapshots=st.sampled_from([0, 0, 2]),
)
REQUESTS = st.tuples(
    st.lists(st.sampled_from([7, 8, 9]), min_size=1, max_size=20),
    st.integers(1, 30),
    st.sets(st.one_of(st.integers(0, 39), st.sampled_from(CLOSING)), max_size=2),
    st.one_of(st.none(), st.integers(1, 32)),
)


@examples(120)
@given(LIMITS, st.lists(REQUESTS, min_size=1, max_size=5), st.integers(0, 99), st.booleans())
def test_every_schedule_closes_the_thought_at_the_same_token(limits, wanted, draft_seed, prefix_cache):
    executor = PagedExecutor(limits, draft_seed)
    engine = Engine(executor, prefix_cache=prefix_cache)
    sequences = []
    for prompt, new, stops, budget in wanted:
        thinking = ThinkingBudget(budget, closing_ids) if budget else None
        sequences.append(
            engine.add(Request(tuple(prompt), Sampling(logprobs=1), 5, tuple(stops), new, thinking=thinking))
        )
    for seq, (prompt, new, stops, budget) in zip(sequences, wanted, strict=True):
        results = list(engine.stream(seq))
        tokens = [token for result in results for token in result.token_ids]
        assert tokens == seq.token_ids == expected(prompt, new, stops, budget)
        assert [entry.token_id for result in results for entry in result.logprobs] == tokens
        assert seq.finish_reason == ("stop" if tokens[-1] in stops else "length")
        assert (seq.stats.prompt_tokens, seq.stats.new_tokens) == (len(prompt), len(tokens))
    assert not engine.running and engine.cache.pool.num_held == 0
    while executor.queue:
        executor.run_one()
    assert not executor.running, "every slot is released"


def test_an_error_behind_a_closed_thought_names_its_position_in_the_whole_text():
    class Overflowing(PagedExecutor):
        def _decode(self, running, mask, certain):
            return SlotResult(non_finite=True) if len(running.tokens) == 12 else super()._decode(running, mask, certain)

    engine = Engine(Overflowing(paged_limits(prefill_chunk=16)))
    seq = engine.add(Request((8, 9), Sampling(), 5, (), 20, thinking=ThinkingBudget(3, lambda token_ids: CLOSING)))
    with pytest.raises(NonFiniteLogitsError, match=r"position 12\b"):
        list(engine.stream(seq))
    assert len(seq.token_ids) == 10


@pytest.mark.parametrize("num_snapshots", [0, 3])
def test_cached_tokens_are_those_that_the_prompt_found(num_snapshots):
    """What a sequence finds in the cache behind a pause, its own prompt, does not count as cached."""
    engine = Engine(PagedExecutor(paged_limits(max_context=64, prefill_chunk=16, num_snapshots=num_snapshots)))
    for cached in (0, 8):
        budget = ThinkingBudget(3, closing_ids)
        seq = engine.add(Request((8, 9) * 5, Sampling(), 5, (), 12, thinking=budget))
        assert len([token for result in engine.stream(seq) for token in result.token_ids]) == 12
        assert seq.token_ids[3:6] == list(CLOSING) and seq.stats.cached_tokens == cached


@given(LIMITS, st.integers(1, 6), st.integers(0, 9))
def test_cancelling_around_the_closing_leaves_nothing(limits, budget, num_read):
    engine = Engine(PagedExecutor(limits))
    request = Request((8, 9), Sampling(), 5, (), 30, thinking=ThinkingBudget(budget, closing_ids))
    seq, beside = engine.add(request), engine.add(Request((9, 9), Sampling(), 5, (), 30))
    stream = engine.stream(seq)
    for _ in range(num_read):
        next(stream, None)
    engine.finish(seq, "cancelled")
    rest = [token for result in engine.stream(beside) for token in result.token_ids]
    assert rest == expected((9, 9), 30, (), None)
    assert not engine.running and engine.cache.pool.num_held == 0


def test_only_the_last_page_is_computed_again():
    executor = PagedExecutor(paged_limits(max_context=64, prefill_chunk=32))
    engine = Engine(executor)
    seq = engine.add(
        Request(tuple(range(8, 28)), Sampling(), 5, (), 30, thinking=ThinkingBudget(9, lambda tokens: CLOSING))
    )
    list(engine.stream(seq))
    prefills = [(step.position, len(step.token_ids)) for step in executor.steps if hasattr(step, "is_last")]
    assert prefills == [(0, 20), (28, 4)], "20 + 8 of 29 tokens are written"
    assert seq.stats.cached_tokens == 0, "of the prompt"


def test_a_sequence_that_waits_behind_its_thought_goes_before_all_others():
    """Where a sequence has a state, its slot is free while it waits; it began when it got its first slot."""
    executor = PagedExecutor(paged_limits(max_context=64, prefill_chunk=32, max_sequences=1, num_snapshots=2))
    engine = Engine(executor)
    thinking = ThinkingBudget(3, lambda tokens: CLOSING)
    first, second = (engine.add(Request((8, 9), Sampling(), seed, (), 9, thinking=thinking)) for seed in (5, 6))
    while not first.started_at:
        engine.advance()
    begun = first.started_at
    assert len(list(engine.stream(second))) > 0
    assert [step.seed for step in executor.steps if isinstance(step, Admit)] == [5, 5, 6, 6]
    assert first.started_at == begun


def test_what_decode_steps_have_written_is_not_reused_behind_a_closed_thought():
    """A prefill would round it in another way, and the next prompt must not depend on what came before."""
    engine = Engine(PagedExecutor(paged_limits(max_context=64, prefill_chunk=32)))
    thinking = ThinkingBudget(6, lambda tokens: CLOSING)
    seq = engine.add(Request((8, 9, 8, 9, 8), Sampling(), 5, (), 20, thinking=thinking))
    list(engine.stream(seq))
    assert engine.cache.num_known(seq.all_token_ids) == 4, "the full page of the prompt"


@pytest.mark.parametrize("budget", range(1, 9))
def test_the_next_turn_goes_on_with_the_state_behind_the_closing(budget):
    """The next turn resumes from the state kept after the closing tokens; the executor checks states and pages."""
    limits = paged_limits(max_context=64, prefill_chunk=32, run_ahead=3, num_snapshots=4)
    engine = Engine(PagedExecutor(limits), prefix_cache="fast")
    thinking = ThinkingBudget(budget, lambda tokens: CLOSING)
    seq = engine.add(Request((8, 9, 8), Sampling(), 5, (), budget + 6, thinking=thinking))
    list(engine.stream(seq))
    again = engine.add(Request((*seq.all_token_ids, 7), Sampling(), 5, (), 1))
    list(engine.stream(again))
    assert again.num_cached >= (3 + budget + 6) // 4 * 4 - 4


@pytest.mark.parametrize(("prompt_end", "answer", "marker"), [
    ("<think>\n", "so", "</think>"), ("<think>\n", "so</think>yes", None), ("bot\n", "<think>hm", "</think>"),
    ("bot\n", "\n<think>\nhm </think>", None), ("bot\n", "I <think>", None), ("bot\n", "", None),
    ("<|thought_start|>", "a </think>", "<|thought_end|>"), ("<think>\n\n</think>\n\n", "yes", None),
])  # fmt: skip
def test_whether_a_thought_is_open(prompt_end, answer, marker):
    assert open_marker(prompt_end, answer) == marker


@pytest.mark.parametrize(("template", "expected_text"), [
    ("<think>\n\n</think>{{ '\n' }}", "\n</think>\n"), ("bot{% if enable_thinking %}<think>{% endif %}", None),
    ("<think></think> {{ messages[0].content }}", None), ("{{ raise_exception('no') }}", None),
])  # fmt: skip
def test_the_gap_is_the_templates(template, expected_text, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template)
    found = closing_text(ChatTemplate.open(tmp_path), "</think>")
    assert found == (expected_text or "\n</think>\n\n") and closing_text(None, "</think>") == "\n</think>\n\n"


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[bot]<think>"
    "{% if enable_thinking == false %}\n</think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.mark.parametrize("settings", [{}, {"draft": "lookup"}, {"prefix_cache": False}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_of_a_model(checkpoint, settings, temperature):
    """After the closing marker comes what a prompt of everything before gives, at the same positions with the same
    seed."""
    fields = {"temperature": temperature, "seed": 3, "ignore_eos": True, "repetition_penalty": 1.2}
    with LLM(checkpoint, executor="reference", **settings) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "hi"}])
        free = llm.generate(prompt, SamplingParams(max_new_tokens=90, **fields)).token_ids
        closing = tuple(llm.tokenizer.encode("\n</think>\n", add_special_tokens=False))
        begun = (*free[:70], *closing)
        rest = llm.generate([*prompt, *begun], SamplingParams(max_new_tokens=20, **fields)).token_ids
        whole = SamplingParams(max_new_tokens=len(begun) + 20, max_thinking_tokens=70, logprobs=2, **fields)
        answer = llm.generate(prompt, whole)
        assert answer.token_ids == (*begun, *rest)
        assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
        forced = answer.logprobs[70 : len(begun)]
        assert all(entry.logprob == 0 and entry.top == () for entry in forced)
        assert answer.stats.new_tokens == len(answer.token_ids) and answer.finish_reason == "length"
        short = SamplingParams(max_new_tokens=40, max_thinking_tokens=70, **fields)
        assert llm.generate(prompt, short).token_ids == free[:40]


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_stop_strings_around_the_closing(checkpoint, draft):
    """Token ids end with the token, sampled or forced, that completes a stop string; the slot is free afterwards."""
    fields = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True, "max_thinking_tokens": 30}
    with LLM(checkpoint, executor="reference", draft=draft) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "hi"}])
        whole = llm.generate(prompt, SamplingParams(**fields))
        text, forced = whole.text, whole.text.index("\n</think>")
        for stop in ("\n</th", text[forced - 3 : forced], text[forced - 2 : forced + 3], text[-4:-1]):
            cut = llm.generate(prompt, SamplingParams(**fields, stop=stop, logprobs=1))
            assert cut.finish_reason == "stop" and cut.text == text.partition(stop)[0]
            tokens = whole.token_ids[: len(cut.token_ids)]
            assert cut.token_ids == tokens and len(cut.logprobs) == len(tokens) == cut.stats.new_tokens
            assert stop in llm.tokenizer.decode(tokens)
            if "\ufffd" not in stop:  # U+FFFD is certain only a byte later
                assert stop not in llm.tokenizer.decode(tokens[:-1])
        assert llm.generate(prompt, SamplingParams(**fields)).token_ids == whole.token_ids


def test_without_a_thought_nothing_is_forced(checkpoint):
    fields = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    with LLM(checkpoint, executor="reference") as llm:
        for prompt in ("plain text", llm.chat_prompt([{"role": "user", "content": "hi"}], enable_thinking=False)):
            free = llm.generate(prompt, SamplingParams(**fields))
            bound = llm.generate(prompt, SamplingParams(**fields, max_thinking_tokens=9))
            assert (bound.token_ids, bound.text) == (free.token_ids, free.text)


def test_a_model_without_a_tokenizer_has_no_budget(checkpoint):
    with LLM(checkpoint, executor="reference", load_format="dummy") as llm:
        llm.maker.tokenizer = None
        with pytest.raises(RequestError, match="max_thinking_tokens"):
            llm.generate([1, 2], SamplingParams(max_thinking_tokens=4))
