"""What a job leaves: its end with reason and times, the results of readings, and the answers to compute again."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedExecutor, plain_continuation
from unit.test_sharing import generation, shared_engine

from cpmrt.config import Sampling
from cpmrt.engine import Engine, Request, Sequence
from cpmrt.errors import NonFiniteLogitsError
from cpmrt.executor import Decode, ExecutorLimits, Prefill, Release
from cpmrt.sharing.jobs import EndsInbox
from cpmrt.sharing.reading_results import pooled, scores
from cpmrt.sharing.remade_answers import RemadeAnswers


def result_of(reading: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


def test_a_job_without_a_token_has_no_time_to_the_first() -> None:
    shared, inbox = shared_engine(1), EndsInbox()
    jobs = [generation([1]), generation([2])]
    shared.submit(jobs, inbox)
    shared.cancel(jobs)
    ends = [shared.next(inbox)[1] for _ in jobs]
    assert [(end.reason, end.first_token_s) for end in ends] == [("cancelled", 0.0)] * 2
    assert all(end.queued_s > 0 for end in ends)


def test_a_job_whose_step_fails_ends_with_the_error() -> None:
    shared, inbox = shared_engine(1), EndsInbox()
    submit, error = shared.engine.executor.submit, RuntimeError("a fault")

    def failing(step: Any) -> Any:
        if isinstance(step, Decode):
            raise error
        return submit(step)

    shared.engine.executor.submit = failing
    shared.submit([generation([1])], inbox)
    end = shared.next(inbox)[1]
    assert (end.reason, end.error) == ("error", error)


def test_a_fault_of_one_answer_is_no_error_of_the_thread_that_drives() -> None:
    shared, mine, other = shared_engine(2), EndsInbox(), EndsInbox()
    submit = shared.engine.executor.submit

    def failing(step: Any) -> Any:
        if isinstance(step, Prefill) and step.token_ids == (9, 9):
            raise RuntimeError("a fault")
        return submit(step)

    shared.engine.executor.submit = failing
    shared.submit([generation([9, 9])], other)
    shared.submit([job := generation([1, 2])], mine)
    assert shared.next(mine)[0] is job and str(other.get()[1].error) == "a fault"
    assert list(job.completion.token_ids) == plain_continuation([1, 2], 0, 12, set())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_job_ends_though_the_device_is_lost_that_should_release_it(is_cancelled: bool) -> None:
    """The job is cancelled, or its text cannot be made. The error comes with the next step that is submitted."""
    shared, inbox, job = shared_engine(1), EndsInbox(), generation([1], 90)
    submit = shared.engine.executor.submit

    def failing(step: Any) -> Any:
        if isinstance(step, Release):
            raise RuntimeError("the device is lost")
        return submit(step)

    def fail(result: object) -> None:
        raise ValueError("no text")

    shared.engine.executor.submit = failing
    shared.submit([job], inbox)
    if is_cancelled:
        while not job.sequence.token_ids:
            shared._run_step()
        shared.cancel([job])
        assert inbox.get()[1].reason == "cancelled"
    else:
        job.text.push = fail  # type: ignore[method-assign]
        assert str(shared.next(inbox)[1].error) == "no text"
    assert shared.is_idle and job.sequence.finish_reason == "cancelled"


@pytest.mark.parametrize("row", range(5))
def test_a_score_that_is_no_number_is_named_by_its_position(row: int) -> None:
    """The logits of a row are those of the token at the position after it; no token follows the last row."""
    logits = np.zeros((5, 8), np.float32)
    assert result_of(scores((1, 2, 3, 4, 5), iter((logits[:3], logits[3:])))) == pytest.approx([-np.log(8)] * 4)
    logits[row, 2] = np.nan
    reading = scores((1, 2, 3, 4, 5), iter((logits[:3], logits[3:])))
    if row == 4:
        assert len(result_of(reading)) == 4
    else:
        with pytest.raises(NonFiniteLogitsError, match=rf"position {row + 1}\b"):
            result_of(reading)


@pytest.mark.parametrize("mean", [False, True])
def test_an_embedding_is_finite_or_an_error(mean: bool) -> None:
    states = np.zeros((3, 4), np.float32)
    ids = (1, 2, 3)
    assert result_of(pooled(ids, iter((states[:2], states[2:])), mean=mean, normalize=True)).tolist() == [0.0] * 4
    states[2, 1] = np.inf
    with pytest.raises(NonFiniteLogitsError):
        result_of(pooled(ids, iter((states[:2], states[2:])), mean=mean, normalize=False))


def ended(prompt: int, answer: int, failure: Exception | None = None) -> Sequence:
    request = Request((prompt,) * prompt, Sampling(), 0, (), answer)
    return Sequence(request, token_ids=list(range(answer)), failure=failure)


def test_answers_are_computed_again_where_they_fill_pages_of_their_own() -> None:
    """Not after a fault; and not where no room is left for the token that a prompt asks for."""
    limits = ExecutorLimits(1, 32, 16, num_pages=8, page_size=4, remakes_answers=True)
    remade = RemadeAnswers(Engine(ScriptedExecutor(limits)))
    for seq in (ended(7, 1), ended(6, 1), ended(8, 3), ended(9, 3, RuntimeError()), ended(10, 22), ended(11, 20)):
        remade.note(seq)
    jobs = []
    while (job := remade.next()) is not None:
        jobs.append(job)
    assert [(job.request.prompt_ids[0], len(job.request.prompt_ids)) for job in jobs] == [(11, 28), (7, 8)]


def test_an_answer_that_had_to_wait_comes_before_older_ones() -> None:
    limits = ExecutorLimits(1, 32, 16, num_pages=8, page_size=4, remakes_answers=True)
    remade = RemadeAnswers(Engine(ScriptedExecutor(limits)))
    for prompt in (5, 6, 7):
        remade.note(ended(prompt, 9))
    newest = remade.next()
    assert newest is not None
    remade.put_back(newest)
    found = [job.request.prompt_ids for job in iter(remade.next, None)]
    assert found[0] == newest.request.prompt_ids and [text[0] for text in found] == [7, 6, 5]
