"""A device that is lost, or one step that fails: everybody hears of it, nobody waits for ever, no slot stays taken."""

import threading

import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.engine import Engine
from cpmrt.errors import DeviceError
from cpmrt.executor import Decode, Prefill, Release
from cpmrt.sharing.jobs import EndsInbox

LOST = "the device is lost"
WORK = (Prefill, Decode)


class Fails:
    """An executor around another one: the `number`-th step of some kinds fails, when it is submitted or waited for.

    With `is_lost` all later steps fail too.
    """

    def __init__(self, executor, kinds, number, *, at_submit, is_lost=True):
        self._executor, self.limits = executor, executor.limits
        self._kinds, self._left, self._at_submit, self._stays = kinds, number, at_submit, is_lost
        self._is_lost = False

    def submit(self, step):
        self._left -= isinstance(step, self._kinds)
        fails_now = isinstance(step, self._kinds) and self._left == 0
        if self._is_lost or (fails_now and self._at_submit):
            self._is_lost = self._stays
            raise DeviceError(LOST)
        self._is_lost = fails_now
        return self if fails_now else self._executor.submit(step)

    def is_done(self):
        return True

    def wait(self):
        raise DeviceError(LOST)

    def close(self):
        self._executor.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=256)


def params(count):
    return SamplingParams(max_new_tokens=count, ignore_eos=True, seed=1)


def ends_of(llm, counts):
    """Return the reason and the error with which requests of so many tokens end, each read by its own thread."""
    inboxes, ends = [EndsInbox() for _ in counts], {}
    for index, (inbox, count) in enumerate(zip(inboxes, counts, strict=True)):
        llm.shared.submit([llm.maker.only_choice([5 + index, 6], params(count))], inbox)

    def read(index):
        while index not in ends:
            try:
                _, end = llm.shared.next(inboxes[index])
            except DeviceError:  # the thread that drives gets this error besides its request's end
                continue
            ends[index] = end.reason, None if end.error is None else str(end.error)

    threads = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [ends.get(index) for index in range(len(counts))]


@pytest.mark.parametrize(("slots", "counts", "kinds", "number", "at_submit", "ends"), [
    (1, [5, 5], WORK, 3, False, [("error", LOST)] * 2),
    (1, [5, 5], WORK, 3, True, [("error", LOST)] * 2),
    (2, [4, 4], WORK, 5, False, [("error", LOST)] * 2),
    (2, [9, 3], WORK, 5, False, [("error", LOST)] * 2),
    (2, [4, 4, 4, 4], WORK, 3, False, [("error", LOST)] * 4),
    (2, [3, 9], Release, 1, True, [("length", None), ("error", LOST)]),
], ids=str)  # fmt: skip
def test_everybody_hears_of_a_lost_device(checkpoint, slots, counts, kinds, number, at_submit, ends):
    llm = LLM(checkpoint, executor="reference", max_sequences=slots)
    llm.use(Engine(Fails(llm.executor, kinds, number, at_submit=at_submit)))
    assert ends_of(llm, counts) == ends
    assert ends_of(llm, [3]) == [("error", LOST)], "so does who comes later"
    assert len(llm.engine.slots.free) == slots and llm.engine.is_idle and llm.engine.cache.pool.num_held == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_release_that_fails_once_costs_nobody_anything(checkpoint, number):
    llm = LLM(checkpoint, executor="reference", max_sequences=2)
    wanted = [llm.generate([5 + index, 6], params(count)).token_ids for index, count in enumerate([3, 9, 4])]
    llm.use(Engine(Fails(llm.executor, Release, number, at_submit=True, is_lost=False)))
    assert ends_of(llm, [3, 9, 4]) == [("length", None)] * 3
    assert len(llm.engine.slots.free) == 2 and llm.engine.is_idle and llm.engine.cache.pool.num_held == 0
    assert [llm.generate([5 + index, 6], params(count)).token_ids for index, count in enumerate([3, 9, 4])] == wanted
