"""Rings of commands and answers, without a device: reading answers, starting waiting steps, and answers that never
come."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from cpmrt.config import Sampling
from cpmrt.cuda.driver import host_memory
from cpmrt.cuda.driver.graphs import LaunchQueue
from cpmrt.cuda.step.rings import Rings, WithCertain
from cpmrt.cuda.step.structs import (
    COMMAND,
    DECODE,
    DECODE_CERTAIN,
    NO_TOKEN,
    NON_FINITE,
    PREFILL,
    RESULT_RECORD,
    RING_ENTRIES,
    SPECULATE,
)
from cpmrt.errors import DeviceError, RequestError
from cpmrt.executor import Admit, Prefill, SlotResult

IDLE, BUSY, FAULT = 0, 600, 700


class HostMemory:
    """Stand-in for page-locked memory, without the page lock."""

    all: list[HostMemory]

    def __init__(self, nbytes):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.all.append(self)

    def array(self, dtype):
        return self.bytes.view(dtype)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise AssertionError("closed, though there was room")


class Device:
    """A pretended device that answers launched commands when it is told to."""

    def __init__(self):
        self.status = BUSY
        self.rings = Rings(SimpleNamespace(ptr=0), 8, 4, 50)
        commands, results = HostMemory.all
        entries = commands.bytes.reshape(RING_ENTRIES, -1)
        self.commands = entries[:, : COMMAND.itemsize].view(COMMAND)[:, 0]
        self.payloads = entries[:, COMMAND.itemsize :].view(np.int32)
        records = results.bytes.view(RESULT_RECORD)
        self.words, self.logprobs = records["words"], records["logprobs"]

    def answer(self, number, *tokens):
        self.words[(number - 1) % RING_ENTRIES][: len(tokens)] = [number << 32 | token for token in tokens]


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    HostMemory.all = []
    monkeypatch.setattr(host_memory, "HostBuffer", HostMemory)
    made = Device()
    runtime = SimpleNamespace(streamQuery=lambda stream: made.status, CUDARuntimeError=lambda status: f"error {status}")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    yield made


def test_an_answer_is_there_once_all_its_words_are(device):
    device.rings.write_slots(DECODE, (2, 0))
    answer = device.rings.sent(2, (0, 0))
    assert not answer.is_done()
    device.answer(1, 7)
    assert not answer.is_done()
    device.answer(1, 7, NO_TOKEN)
    assert answer.is_done() and answer.wait().slots == (SlotResult((7,)), SlotResult())


def test_an_answer_of_a_screened_step_has_its_count_of_tokens_too(device):
    device.rings.write_slots(DECODE, (1,))
    answer = device.rings.sent(1, (0,), is_screened=True)
    device.answer(1, 7)
    assert not answer.is_done(), "the count is not there"
    device.words[0][-1] = 1 << 32 | 29
    assert answer.wait().slots == (SlotResult((7,)),) and answer.wait().num_rescored == 29
    device.rings.write_slots(DECODE, (1,))
    plain = device.rings.sent(1, (0,))
    device.answer(2, 8)
    assert plain.wait().num_rescored is None


def test_a_screened_step_that_was_not_run_any_more_has_no_count(device):
    """A screened step that did not run, as its last sequence had ended earlier in the launch, is done without a
    count."""
    device.rings.write_slots(DECODE, (1, 3))
    answer = device.rings.sent(2, (0, 0), is_screened=True)
    device.answer(1, NO_TOKEN)
    assert not answer.is_done()
    device.answer(1, NO_TOKEN, NO_TOKEN)
    assert answer.is_done(), "whoever waits for the count waits for ever"
    assert answer.wait().slots == (SlotResult(), SlotResult()) and answer.wait().num_rescored is None


@pytest.mark.parametrize(("status", "message"), [
    (FAULT, "failed in the middle of a step: error 700"), (IDLE, "finished step 1 without an answer"),
])  # fmt: skip
def test_a_count_of_tokens_that_never_comes(device, status, message):
    device.rings.write_slots(DECODE, (1,))
    answer = device.rings.sent(1, (0,), is_screened=True)
    device.answer(1, 7)
    assert not answer.is_done()
    device.status = status
    with pytest.raises(DeviceError, match=message):
        for _ in range(2500):
            assert not answer.is_done()


def test_slots_that_bring_certain_tokens_have_the_answer_of_their_newest_row(device):
    certain = ((41, 42), (), (43,))
    device.rings.write_certain((2, 0, 1), certain)
    answer = WithCertain(device.rings.sent(6, (0,) * 6), certain)
    device.answer(1, NO_TOKEN, NO_TOKEN, 7, 8, NO_TOKEN)
    assert not answer.is_done()
    device.answer(1, NO_TOKEN, NO_TOKEN, 7, 8, NO_TOKEN, NON_FINITE)
    slots = answer.wait().slots
    assert slots == (SlotResult((41, 42, 7)), SlotResult((8,)), SlotResult((43,), non_finite=True))


def test_a_row_of_the_last_token_goes_before_the_rows_of_certain_tokens(device):
    device.rings.write_certain((2, 0), ((41, 42), ()))
    command = device.commands[0]
    assert (command["kind"], command["num_rows"]) == (DECODE_CERTAIN, 4)
    assert device.payloads[0, :8].reshape(4, 2).tolist() == [[2, -1], [2, 41], [2, 42], [0, -1]]
    with pytest.raises(RequestError, match="unknown token id: expected 0 to 49, got 50"):
        device.rings.write_certain((2, 0), ((49, 50), ()))


def test_log_probabilities_behind_certain_tokens_are_those_of_the_newest_row(device):
    certain = ((41, 42), (), (43, 44))
    device.rings.write_certain((2, 0, 1), certain)
    answer = WithCertain(device.rings.sent(7, (0, 0, 2, 0, 0, 0, 1)), certain)
    for row, logprob in ((2, -1.5), (6, -2.5)):
        device.logprobs[0][row]["logprob"] = logprob
    device.answer(1, NO_TOKEN, NO_TOKEN, 7, NO_TOKEN, NO_TOKEN, NO_TOKEN, 9)
    first, ended, last = answer.wait().slots
    assert (first.token_ids, ended, last.token_ids) == ((41, 42, 7), SlotResult(), (43, 44, 9))
    assert [(entry.token_id, entry.logprob) for entry in (*first.logprobs, *last.logprobs)] == [(7, -1.5), (9, -2.5)]


def test_who_asks_for_a_step_that_waits_launches_it_and_nothing_behind_a_launched_one(device):
    launched = []
    queue = LaunchQueue(lambda key, count: launched.append((key, count)), 4)
    starts, answers = [], []
    for _ in range(6):
        device.rings.write_slots(DECODE, (0,))
        starts.append(queue.add("decode", (0,)))
        answers.append(device.rings.sent(1, (0,), starts[-1]))
    assert launched == [("decode", 4)] and starts[3] is None
    assert not answers[0].is_done() and not answers[3].is_done()
    assert launched == [("decode", 4)] and queue.num_waiting == 2
    assert not answers[4].is_done() and not answers[5].is_done()
    assert launched == [("decode", 4), ("decode", 1), ("decode", 1)]


def test_a_place_is_written_again_once_its_answer_was_read(device):
    sent = []
    for number in range(1, RING_ENTRIES + 1):
        device.rings.write_slots(DECODE, (0,))
        sent.append(device.rings.sent(1, (0,)))
        device.answer(number, number)
    device.rings.write_slots(SPECULATE, (3,))
    assert device.commands[0]["kind"] == SPECULATE and device.commands[0]["slot"] == 3
    device.answer(RING_ENTRIES + 1, 99)
    assert sent[0].wait().slots[0].token_ids == (1,), "read before its words were overwritten"


def test_in_a_steady_run_nothing_is_written(device):
    for number in range(1, RING_ENTRIES + 2):
        device.rings.write_slots(DECODE, (1, 2))
        device.rings.sent(2, (0, 0))
        device.answer(number, 5, 5)
        device.commands[:]["num_rows"] = 9
    device.rings.write_slots(DECODE, (1, 2))
    assert (device.commands["num_rows"] == 9).all()
    device.rings.write_slots(SPECULATE, (1, 2))
    assert device.commands[1]["num_rows"] == 2


def test_a_place_that_held_another_kind_of_command_is_written_again(device):
    """A command that only names slots is written anew where a command with tokens has taken its place meanwhile."""
    def fill_up():
        while device.rings.next_number % RING_ENTRIES != 1:
            device.rings.write_slots(DECODE, (1,))
            sent()

    def sent():
        device.rings.sent(1, (0,))
        device.answer(device.rings.next_number - 1, 5)

    device.rings.write_slots(DECODE, (2,))
    sent()
    fill_up()
    device.rings.write(Prefill(0, (1, 2), 0, True))
    assert device.commands[0]["kind"] == PREFILL
    sent()
    fill_up()
    device.rings.write_slots(DECODE, (2,))
    assert device.commands[0]["kind"] == DECODE and device.commands[0]["slot"] == 2


def test_a_slot_that_had_ended_does_not_get_its_certain_tokens(device):
    certain = ((41,), (42,))
    device.rings.write_certain((2, 0), certain)
    answer = WithCertain(device.rings.sent(4, (0,) * 4), certain)
    device.answer(1, NO_TOKEN, NO_TOKEN, NO_TOKEN, 8)
    assert answer.wait().slots == (SlotResult(), SlotResult((42, 8)))


def test_a_refused_step_leaves_the_ring_as_it_was(device):
    with pytest.raises(RequestError, match="unknown token id"):
        device.rings.write(Prefill(0, (1, 50), 0, True))
    device.rings.write(Admit(0, Sampling(), 0, 1, ()))
    answer = device.rings.sent(1, ())
    device.answer(1, NO_TOKEN)
    assert answer.wait().slots == ()


@pytest.mark.parametrize(("status", "message"), [
    (FAULT, "failed in the middle of a step: error 700"), (IDLE, "finished step 1 without an answer"),
])  # fmt: skip
def test_an_answer_that_never_comes(device, status, message):
    device.rings.write_slots(DECODE, (0,))
    answer = device.rings.sent(1, (0,))
    for _ in range(2500):
        assert not answer.is_done()
    device.status = status
    with pytest.raises(DeviceError, match=message):
        answer.wait()


def test_an_answer_that_comes_while_the_device_is_asked_whether_it_is_done(device, monkeypatch):
    def finish(stream):
        device.answer(1, 7)
        return IDLE

    device.rings.write_slots(DECODE, (0,))
    answer = device.rings.sent(1, (0,))
    monkeypatch.setattr(sys.modules["cupy.cuda"].runtime, "streamQuery", finish)
    assert answer.wait().slots == (SlotResult((7,)),)
