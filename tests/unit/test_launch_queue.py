"""Steps that wait for others to be launched with: they keep their order, and no schedule shows in the tokens."""

from collections import deque

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scripted import TREE_SHAPES, ScriptedExecutor, plain_continuation

from cpmrt.config import EngineConfig, Sampling
from cpmrt.cuda.driver.graphs import LaunchQueue
from cpmrt.engine import Engine, Request
from cpmrt.errors import ConfigError
from cpmrt.executor import Decode, ExecutorLimits, Speculate


class LoopingExecutor(ScriptedExecutor):
    """An executor that launches decode steps through the queue, as the CUDA one does; `launches` has each launch's
    steps."""

    def __init__(self, limits, steps_per_launch, **settings):
        super().__init__(limits, **settings)
        self.steps_per_launch, self.launches = steps_per_launch, []
        self.waiting, self.launch_queue = deque(), LaunchQueue(self.start, steps_per_launch)

    def submit(self, step):
        pending = super().submit(step)
        entry = self.queue.pop()
        if isinstance(step, (Decode, Speculate)):
            self.waiting.append(entry)
            self.launch_queue.add(getattr(step, "shape", None), step.slots)
        else:
            self.launch_queue.flush()
            self.queue.append(entry)
        return pending

    def start(self, shape, count):
        steps = [self.waiting.popleft() for _ in range(count)]
        assert {(getattr(step, "shape", None), step.slots) for step, _ in steps} == {(shape, steps[0][0].slots)}
        self.queue.extend(steps)
        self.launches.append(count)

    def run_one(self):
        if not self.queue:  # the step whose result is asked for still waits
            self.launch_queue.flush()
        super().run_one()


def limits_for(steps_per_launch, max_sequences=1, shapes=(), seconds=(), chunk=16):
    run_ahead = max(4, 2 * steps_per_launch)
    return ExecutorLimits(max_sequences, 64, chunk, run_ahead, tree_shapes=shapes, step_seconds=seconds)


REQUESTS = st.tuples(
    st.lists(st.integers(0, 49), min_size=1, max_size=20),
    st.integers(1, 40),
    st.integers(0, 5),
    st.sets(st.integers(0, 49), max_size=4),
)


class Sessions(RuleBasedStateMachine):
    """State machine in which requests come, are read from, and are cancelled at any time."""

    def __init__(self):
        super().__init__()
        self.streams, self.closed = [], set()

    @initialize(
        steps=st.integers(1, 8),
        slots=st.integers(1, 3),
        shapes=st.sampled_from([(), *TREE_SHAPES]),
        adapts=st.booleans(),
    )
    def open(self, steps, slots, shapes, adapts):
        seconds = tuple(1 + index / 3 for index in range(len(shapes) + 1)) if adapts else ()
        self.executor = LoopingExecutor(limits_for(steps, slots, shapes, seconds, chunk=5), steps)
        self.engine = Engine(self.executor, prefix_cache=False)

    @rule(wanted=REQUESTS)
    def add(self, wanted):
        prompt, new, seed, stop = wanted
        seq = self.engine.add(Request(tuple(prompt), Sampling(), seed, tuple(stop), new))
        self.streams.append((seq, self.engine.stream(seq), [], plain_continuation(prompt, seed, new, stop)))

    @rule(which=st.integers(0, 9), pieces=st.integers(1, 9), closes=st.booleans())
    def read(self, which, pieces, closes):
        if not self.streams:
            return
        which %= len(self.streams)
        _, stream, read, _ = self.streams[which]
        for _ in range(pieces):
            piece = next(stream, None)
            if piece is None:
                break
            read.extend(piece.token_ids)
        if closes:
            stream.close()
            self.closed.add(which)

    @invariant()
    def tokens_are_those_of_plain_decoding(self):
        for seq, _, read, expected in self.streams:
            assert read == expected[: len(read)]
            assert seq.finish_reason in (None, "cancelled") or seq.token_ids == expected

    def teardown(self):
        for which, (_, stream, read, expected) in enumerate(self.streams):
            for piece in stream:
                read.extend(piece.token_ids)
            assert read == expected[: len(read)] and (which in self.closed or read == expected)
        assert set(self.executor.launches) <= {1, self.executor.steps_per_launch}
        self.executor.launch_queue.flush()
        assert not self.executor.waiting


TestSessions = Sessions.TestCase
TestSessions.settings = examples(60, stateful_step_count=25)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_a_long_generation_is_launched_in_whole_loops(steps):
    executor = LoopingExecutor(limits_for(steps), steps)
    engine = Engine(executor)
    seq = engine.add(Request((1, 2, 3), Sampling(), 0, (), 32))
    tokens = [token for result in engine.stream(seq) for token in result.token_ids]
    assert tokens == plain_continuation([1, 2, 3], 0, 32, set())
    # The first token is the prefill's.
    assert executor.launches == [steps] * (31 // steps) + [1] * (31 % steps)
    assert executor.most_in_flight <= executor.limits.run_ahead


@given(
    st.integers(1, 8),
    st.lists(st.one_of(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.none()), max_size=60),
)
def test_order_and_size_of_launches(steps, wanted):
    """Steps are launched in order, one or `steps` at a time; other work (None) comes after everything that waits."""
    added, launched, queue = [], [], None

    def start(key, count):
        assert count in (1, steps)
        launched.extend([key] * count)

    queue = LaunchQueue(start, steps)
    for step in wanted:
        if step is None:
            queue.flush()
            assert launched == added and not queue.num_waiting
            continue
        key, slot = step
        queue.add((key, slot), (slot,))
        added.append((key, slot))
        assert added[: len(launched)] == launched and len(added) - len(launched) == queue.num_waiting < steps
        assert len(set(added[len(launched) :])) <= 1


@pytest.mark.parametrize("wishes", [
    {"steps_per_launch": 0}, {"steps_per_launch": 9}, {"steps_per_launch": 2.0},
    {"steps_per_launch": 2, "cuda_graphs": False},
])  # fmt: skip
def test_settings_that_cannot_be(wishes):
    with pytest.raises(ConfigError, match="steps_per_launch"):
        EngineConfig(**wishes)
