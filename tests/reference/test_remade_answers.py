"""Answers that are computed once more, as prompts, on the NumPy executor: when, how often, and with which bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from executors.cuda_models import BASE, ROWS, write_model

from cpmrt import LLM, SamplingParams
from cpmrt.sharing.jobs import STOP, WORK, EndsInbox, Inbox

PAGE = 64
ASKED = SamplingParams(max_new_tokens=100, temperature=0.8, seed=3, ignore_eos=True, logprobs=1)


def opened(folder: Path, prefix_cache: bool | str = True) -> LLM:
    """Return a model whose executor claims to be one for which answers are computed again as prompts."""
    llm = LLM(folder, executor="reference", max_context=1024, max_sequences=2, prefix_cache=prefix_cache)
    llm.engine.limits = replace(llm.engine.limits, remakes_answers=True)
    return llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("minicpm"), BASE | ROWS["minicpm"] | {"max_position_embeddings": 1024})


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with opened(folder) as found:
        yield found


def steps_of(llm: LLM) -> list[object]:
    """Return a list to which every step from now on is appended."""
    steps: list[object] = []
    llm.engine.listener = lambda step, result: steps.append(step)
    return steps


def test_a_next_turn_finds_the_answer_and_has_the_same_bits(llm: LLM, folder: Path) -> None:
    prompt = list(range(1, 80))
    text = [*prompt, *llm.generate(prompt, ASKED).token_ids]
    assert llm.engine.slots.num_known(tuple(text)) == PAGE, "the full page of the prompt"
    llm.prepare_next_turn()
    assert llm.engine.slots.num_known(tuple(text)) == len(text) // PAGE * PAGE == 2 * PAGE
    second = llm.generate([*text, 5, 6], ASKED)
    assert second.stats.cached_tokens == 2 * PAGE
    with LLM(folder, executor="reference", max_context=1024, prefix_cache=False) as alone:
        assert alone.generate([*text, 5, 6], ASKED).logprobs == second.logprobs


def test_an_answer_is_computed_again_once(llm: LLM) -> None:
    llm.generate([list(range(1, 80)), list(range(90, 10, -1))], ASKED)
    llm.generate(list(range(1, 9)), replace(ASKED, max_new_tokens=20))  # fills no page
    steps = steps_of(llm)
    llm.prepare_next_turn()
    assert steps
    steps.clear()
    llm.prepare_next_turn()
    assert not steps


@pytest.mark.parametrize("prefix_cache", [False, "fast"])
def test_no_answer_is_computed_again_where_that_is_of_no_use(folder: Path, prefix_cache: bool | str) -> None:
    with opened(folder, prefix_cache) as llm:
        llm.generate(list(range(1, 80)), ASKED)
        steps = steps_of(llm)
        llm.prepare_next_turn()
        assert not steps


def test_a_thread_that_serves_computes_answers_again_between_jobs(llm: LLM) -> None:
    prompts = [[number + index for index in range(1, 70)] for number in range(2)]
    expected = [llm.generate(prompt, ASKED).token_ids for prompt in prompts]
    llm.prepare_next_turn()
    shared, inbox, ends = llm.shared, Inbox(), EndsInbox()
    thread = threading.Thread(target=shared.serve, args=(inbox,))
    thread.start()
    others = [[*prompt, 1] for prompt in prompts]
    texts = []
    for prompt, other, tokens in zip(prompts, others, expected, strict=True):
        for asked in (prompt, other):  # it may arrive while an earlier answer is being computed again
            (job,) = llm.maker.choices(asked, ASKED)
            shared.submit([job], ends)
            inbox.put(WORK)
            item = ends.get()
            assert isinstance(item, tuple) and item[0] is job
            texts.append((*asked, *job.completion.token_ids))
            assert asked is other or job.completion.token_ids == tokens
    deadline = time.monotonic() + 20
    known = llm.engine.slots.num_known
    while any(known(text) < len(text) // PAGE * PAGE for text in texts) and time.monotonic() < deadline:
        time.sleep(0.01)
    inbox.put(STOP)
    thread.join(20)
    assert not thread.is_alive()
    assert [llm.engine.slots.num_known(text) for text in texts] == [len(text) // PAGE * PAGE for text in texts]


def test_a_request_that_comes_while_an_answer_becomes_a_job_is_not_lost(llm: LLM) -> None:
    """A request is carried out if it is submitted between making the job and running it, as a server's loop may do."""
    llm.generate(list(range(1, 80)), ASKED)
    shared, make, inbox = llm.shared, llm.engine.sequence, EndsInbox()
    came = llm.maker.only_choice(list(range(9)), replace(ASKED, max_new_tokens=3))

    def interrupted(request: object) -> object:
        llm.engine.sequence = make
        shared.submit([came], inbox)
        shared.cancel([])
        return make(request)

    llm.engine.sequence = interrupted
    assert shared._remake_one()
    _, end = shared.next(inbox)
    assert (end.reason, end.error) == ("length", None)
    llm.prepare_next_turn()
    assert llm.engine.slots.num_known((*range(1, 80), *llm.generate(list(range(1, 80)), ASKED).token_ids)) == 2 * PAGE
