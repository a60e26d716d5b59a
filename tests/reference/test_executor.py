"""The reference executor's state: slots, chunks, finished sequences, closing."""

from __future__ import annotations

import numpy as np
import pytest
from reference.tiny_models import LLAMA, MINICPM, make_executor

from cpmrt.config import ModelConfig, Sampling
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError, NoDeviceError
from cpmrt.executor import Admit, Decode, Prefill, Release, SlotResult, Speculate

CONFIG = ModelConfig.from_hf(MINICPM)
RANDOM = np.random.default_rng(4)
PROMPTS = [tuple(RANDOM.integers(3, 96, count).tolist()) for count in (70, 5, 64, 17)]
SAMPLED = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, logprobs=3)


def admit(executor, slot, prompt, *, seed=7, count=20, stop=(), chunk=16, sampling=SAMPLED):
    """Admit and prefill a prompt; return the result of its last chunk."""
    executor.submit(Admit(slot, sampling, seed, count, stop)).wait()
    for start in range(0, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        is_last = start + chunk >= len(prompt)
        result = executor.submit(Prefill(slot, tokens, start, is_last)).wait().slots
        assert is_last or result == (SlotResult(),)
    return result[0]


def decode(executor, *slots):
    return executor.submit(Decode(slots)).wait().slots


def run(executor, slot, prompt, count=12, **arguments):
    """Return the results of one sequence: that of its prefill, then one for each decode step."""
    return [admit(executor, slot, prompt, **arguments), *(decode(executor, slot)[0] for _ in range(count - 1))]


def tokens_of(results):
    return [token for result in results for token in result.token_ids]


def test_limits_are_those_of_the_plan():
    limits = make_executor(CONFIG, prefill_chunk=9, max_sequences=3, max_context=100).limits
    assert (limits.max_sequences, limits.max_context, limits.prefill_chunk) == (3, 100, 9)
    assert (limits.run_ahead, limits.num_draft) == (1, 0)


@pytest.mark.parametrize("chunk", [1, 7, 64, 70])
def test_chunked_prefill_equals_whole_prefill(chunk):
    whole = run(make_executor(CONFIG, prefill_chunk=70), 0, PROMPTS[0], chunk=70)
    chunked = run(make_executor(CONFIG, prefill_chunk=chunk), 0, PROMPTS[0], chunk=chunk)
    assert tokens_of(chunked) == tokens_of(whole)
    for ours, theirs in zip(chunked, whole, strict=True):
        assert ours.logprobs[0].logprob == pytest.approx(theirs.logprobs[0].logprob, abs=1e-4)


def test_slots_do_not_disturb_each_other():
    executor = make_executor(CONFIG, max_sequences=4)
    alone = [run(make_executor(CONFIG), 0, prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    results = [[admit(executor, slot, prompt, seed=slot)] for slot, prompt in enumerate(PROMPTS)]
    for order in ((0, 1, 2, 3), (3, 1), (2, 0)) + ((1, 3, 0, 2),) * 9 + ((3, 1, 0, 2),):
        for slot, result in zip(order, decode(executor, *order), strict=True):
            results[slot].append(result)
    for slot in range(4):
        assert results[slot][:12] == alone[slot]


def test_a_released_slot_starts_anew():
    executor = make_executor(CONFIG, max_sequences=2)
    first = run(executor, 1, PROMPTS[0])
    executor.submit(Release(1)).wait()
    assert run(executor, 1, PROMPTS[1]) == run(make_executor(CONFIG), 0, PROMPTS[1])
    executor.submit(Release(1)).wait()
    assert run(executor, 1, PROMPTS[0]) == first


def test_admit_takes_over_a_slot():
    executor = make_executor(CONFIG)
    run(executor, 0, PROMPTS[0])
    assert run(executor, 0, PROMPTS[3]) == run(make_executor(CONFIG), 0, PROMPTS[3])


def test_surplus_steps_after_the_last_token_give_nothing():
    executor = make_executor(CONFIG, max_sequences=2)
    admit(executor, 0, PROMPTS[1], count=3)
    admit(executor, 1, PROMPTS[3], count=20)
    assert [len(decode(executor, 0, 1)[0].token_ids) for _ in range(4)] == [1, 1, 0, 0]
    assert decode(executor, 0) == (SlotResult(),)
    assert len(decode(executor, 1)[0].token_ids) == 1


def test_surplus_rows_do_not_change_the_others():
    executor = make_executor(CONFIG, max_sequences=2)
    admit(executor, 0, PROMPTS[1], count=1)
    results = [admit(executor, 1, PROMPTS[3]), *(decode(executor, 0, 1)[1] for _ in range(11))]
    assert results == run(make_executor(CONFIG), 0, PROMPTS[3])


def test_a_stop_token_is_given_and_ends_the_sequence():
    tokens = tokens_of(run(make_executor(CONFIG), 0, PROMPTS[0], count=12))
    stop = tokens[6]
    executor = make_executor(CONFIG)
    stopped = tokens_of(run(executor, 0, PROMPTS[0], count=12, stop=(stop,)))
    assert stopped == tokens[: tokens.index(stop) + 1]
    assert decode(executor, 0) == (SlotResult(),)


def test_one_new_token_needs_no_decode():
    executor = make_executor(CONFIG)
    assert len(admit(executor, 0, PROMPTS[1], count=1).token_ids) == 1
    assert decode(executor, 0) == (SlotResult(),)


def test_the_last_position_of_the_context_is_usable():
    executor = make_executor(CONFIG, max_context=72)
    prompt = PROMPTS[0]
    results = [admit(executor, 0, prompt, count=2), *decode(executor, 0)]
    assert tokens_of(results) == tokens_of(run(make_executor(CONFIG), 0, prompt, count=2))


def test_prompt_logits_leave_running_sequences_untouched():
    executor, quiet = make_executor(CONFIG, max_sequences=3), make_executor(CONFIG, max_sequences=3)
    disturbed, expected = [admit(executor, 1, PROMPTS[0])], [admit(quiet, 1, PROMPTS[0])]
    for step in range(11):
        chunks = executor.prompt_logits((0, 2)[step % 2], PROMPTS[step % 4])
        next(chunks)
        disturbed += decode(executor, 1)
        list(chunks)
        expected += decode(quiet, 1)
    assert disturbed == expected


def test_prompt_logits_come_in_chunks_and_predict_the_next_token():
    executor = make_executor(CONFIG, prefill_chunk=32)
    chunks = list(executor.prompt_logits(0, PROMPTS[0]))
    assert [chunk.shape for chunk in chunks] == [(32, 96), (32, 96), (6, 96)]
    assert {chunk.dtype for chunk in chunks} == {np.dtype(np.float32)}
    greedy = admit(executor, 0, PROMPTS[0], sampling=Sampling())
    assert greedy.token_ids == (int(np.argmax(chunks[-1][-1])),)


def test_generated_tokens_are_the_prompt_of_a_longer_prompt():
    """Decoding fills the pages as prefilling the same tokens does."""
    greedy = Sampling()
    executor = make_executor(CONFIG, max_sequences=2)
    tokens = tokens_of(run(executor, 0, PROMPTS[2], count=12, sampling=greedy))
    for kept in (1, 5, 11):
        longer = (*PROMPTS[2], *tokens[:kept])
        assert admit(executor, 1, longer, sampling=greedy).token_ids == (tokens[kept],)


def test_a_sampled_sequence_repeats_with_its_seed_only():
    hot = Sampling(temperature=2.0)
    runs = [tuple(tokens_of(run(make_executor(CONFIG), 0, PROMPTS[1], seed=s, sampling=hot))) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_penalties_count_prompt_and_generated_tokens():
    config = ModelConfig.from_hf(LLAMA)
    never_twice = Sampling(repetition_penalty=1000.0)
    prompt = tuple(range(3, 60))
    tokens = tokens_of(run(make_executor(config), 0, prompt, sampling=never_twice))
    plain = tokens_of(run(make_executor(config), 0, prompt, sampling=Sampling()))
    assert len({*tokens, *prompt}) == len(tokens) + len(prompt)
    assert len({*plain, *prompt}) < len(plain) + len(prompt)


def test_logprobs_only_on_request():
    executor = make_executor(CONFIG)
    assert admit(executor, 0, PROMPTS[1], sampling=Sampling()).logprobs == ()
    (entry,) = admit(executor, 0, PROMPTS[1], sampling=Sampling(logprobs=4)).logprobs
    assert len(entry.top) == 4
    assert entry.top[0] == (entry.token_id, entry.logprob)


def test_results_can_be_waited_for_twice():
    executor = make_executor(CONFIG)
    admit(executor, 0, PROMPTS[1])
    pending = executor.submit(Decode((0,)))
    assert pending.wait() == pending.wait()


def test_speculation_is_refused():
    executor = make_executor(CONFIG)
    admit(executor, 0, PROMPTS[1])
    with pytest.raises(ConfigError, match="has no draft"):
        executor.submit(Speculate((0,)))


def test_a_closed_executor_refuses():
    executor = make_executor(CONFIG)
    admit(executor, 0, PROMPTS[1])
    chunks = executor.prompt_logits(0, PROMPTS[0])
    executor.close()
    executor.close()
    for refused in (
        lambda: executor.submit(Decode((0,))),
        lambda: admit(executor, 0, PROMPTS[1]),
        lambda: list(chunks),
        lambda: list(executor.prompt_logits(0, PROMPTS[1])),
    ):
        with pytest.raises(NoDeviceError, match="closed"):
            refused()


def test_closing_between_chunks_of_prompt_logits_is_refused_too():
    executor = make_executor(CONFIG, prefill_chunk=16)
    chunks = executor.prompt_logits(0, PROMPTS[0])
    next(chunks)
    executor.close()
    with pytest.raises(NoDeviceError, match="closed"):
        next(chunks)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_narrow_storage_runs_and_repeats(dtype):
    first = run(make_executor(CONFIG, dtype=dtype), 0, PROMPTS[0])
    assert run(make_executor(CONFIG, dtype=dtype), 0, PROMPTS[0]) == first
    assert first != run(make_executor(CONFIG), 0, PROMPTS[0])
