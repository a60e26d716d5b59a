"""WHILE nodes of CUDA graphs: how often loop.cu lets the body run, the answers to commands that it leaves out, and a
loop amid other launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.test_chain import NUM_ROWS, POSITION, SLOT, ChainDevice

from cpmrt.cuda.step import structs as ss
from cpmrt.dtypes import DType

pytestmark = pytest.mark.gpu

SLOTS = 4
# A stand-in for a step: takes a command, and finishes the sequences that end at this step.
STEP = r"""
extern "C" __global__ void step(unsigned long long* context, char* states, int* count, const int* end_after,
                                int offset, int stride) {
  const int steps = ++*count;
  context[0]++;
  context[1] = context[0];
  for (int slot = 0; slot < 4; slot++)
    if (steps >= end_after[slot]) *reinterpret_cast<int*>(states + slot * stride + offset) = 1;
}
"""
# Logs `mark`; with mark 2, the body of the loop, also advances the position unless the sequence has finished.
NOTE = """
extern "C" __global__ void note(int* log, int* length, int* position, const int* finished, int mark) {
  log[(*length)++] = mark;
  if (mark == 2 && !*finished) (*position)++;
}
"""


class Loop:
    """A graph of at most `passes[0]` passes of `passes[1]` steps a launch, over rows of `slots`. Slot s finishes after
    `end_after[s]` steps of all launches."""

    def __init__(
        self, cuda: Any, passes: tuple[int, int], slots: list[int], num_words: int, end_after: list[int], *, pdl: bool
    ):
        from cpmrt.cuda.driver.graphs import LoopGraph

        self.cuda = cuda
        self.context = cuda.array(np.zeros(ss.STEP_CONTEXT.itemsize, np.uint8))
        self.states = cuda.array(np.zeros(SLOTS * ss.SLOT_STATE.itemsize, np.uint8))
        self.results = cuda.array(np.zeros(ss.RING_ENTRIES * ss.RESULT_RECORD.itemsize, np.uint8))
        self.count = cuda.array(np.zeros(1, np.int32))
        self.rows, self.end_after = (cuda.array(np.array(values, np.int32)) for values in (slots, end_after))
        self.step = cuda.cupy.RawKernel(STEP, "step")
        kernel = cuda.kernel("loop_end", DType.BFLOAT16)
        sizes = map(np.int32, (ss.SLOT_STATE.fields["finished"][1], ss.SLOT_STATE.itemsize))
        arguments = (self.context, self.states, self.count, self.end_after, *sizes)
        with cuda.stream:
            self.step((1,), (1,), arguments)  # loads the kernel
            for array in (self.context, self.states, self.count):
                array.fill(0)

        def body(handle: np.uint64) -> None:
            for _ in range(passes[1]):
                self.step((1,), (1,), arguments)
            last = (handle, *map(np.int32, (*passes, len(slots), num_words)))
            kernel(1, ss.MAX_ROWS, self.results, self.context, self.states, self.rows, *last, pdl=pdl)

        self.graph = LoopGraph(cuda.stream, body)

    def launch(self) -> int:
        """Launch the graph and return how many steps ran."""
        before = int(self.cuda.numpy(self.count)[0])
        self.graph.launch()
        return int(self.cuda.numpy(self.count)[0]) - before

    def words(self) -> Any:
        return self.cuda.numpy(self.results).view(ss.RESULT_RECORD)["words"]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("passes", "slots", "end_after", "runs"), [
    ((5, 1), [0], [99] * 4, [5, 5, 5]),
    ((5, 1), [2], [0, 0, 99, 0], [5, 5, 5]),
    ((5, 1), [1], [99, 3, 99, 99], [3, 1, 1]),
    ((5, 1), [1], [99, 5, 99, 99], [5, 1, 1]),
    ((5, 1), [1], [99, 7, 99, 99], [5, 2, 1]),
    ((5, 1), [0, 3, -1, -1], [2, 0, 0, 9], [5, 4, 1]),
    ((5, 1), [-1, -1], [99] * 4, [1, 1, 1]),
    ((5, 1), [*[-1] * 63, 3], [0, 0, 0, 4], [4, 1, 1]),
    ((2, 4), [1], [99, 9, 99, 99], [8, 4, 4]),
    ((4, 2), [1, 2], [0, 11, 3, 0], [8, 4, 2]),
    ((1, 4), [1], [99, 2, 99, 99], [4, 4, 4]),
])  # fmt: skip
def test_it_goes_on_as_long_as_a_sequence_does(
    cuda: Any, passes: tuple[int, int], slots: list[int], end_after: list[int], runs: list[int], pdl: bool
) -> None:
    loop, num_words, num_steps = Loop(cuda, passes, slots, len(slots), end_after, pdl=pdl), len(slots), np.prod(passes)
    for launch, expected in enumerate(runs):
        assert loop.launch() == expected
        first, end = launch * num_steps + 1, (launch + 1) * num_steps
        context = cuda.numpy(loop.context).view(ss.STEP_CONTEXT)[0]
        assert (context["next_entry"], context["sequence"], context["num_passed"]) == (end, end, 0)
        words = loop.words()
        for number in range(first, end + 1):
            row = words[(number - 1) % ss.RING_ENTRIES]
            is_left = number >= first + expected
            assert (row[:num_words] == (number << 32 | ss.NO_TOKEN)).all() == is_left
            assert (row >> np.uint64(32) == number).sum() == is_left * num_words
    loop.graph.close()


def test_more_words_than_rows(cuda: Any) -> None:
    """Words of the commands left out are answered also where there are more words than rows: a speculative step has one
    sequence and several words."""
    loop = Loop(cuda, (4, 2), [1], 6, [9, 2, 9, 9], pdl=True)
    assert loop.launch() == 2
    for number in range(3, 9):
        assert loop.words()[number - 1][:7].tolist() == [*[number << 32 | ss.NO_TOKEN] * 6, 0]
    loop.graph.close()


@pytest.mark.parametrize(("enabled", "expected"), [(True, [1, 2, 2, 2, 3]), (False, [1, *[2] * 6, 3])])
def test_a_loop_runs_between_what_is_before_and_behind_it(cuda: Any, enabled: bool, expected: list[int]) -> None:
    """The body runs between the launches before and behind it: in a graph as often as the sequence has room, launch by
    launch the most times that it may run."""
    from cpmrt.cuda.driver.graphs import Graphs

    device, graphs = ChainDevice(cuda, used=2, room=POSITION + 4), Graphs(cuda.stream, enabled=enabled)
    log, length = cuda.array(np.zeros(16, np.int32)), cuda.array(np.zeros(1, np.int32))
    offsets = (SLOT * ss.SLOT_STATE.itemsize + ss.SLOT_STATE.fields[name][1] for name in ("position", "finished"))
    state = [device.inner["slot_states"][offset : offset + 4].view(np.int32) for offset in offsets]
    note = cuda.cupy.RawKernel(NOTE, "note")

    def mark(number: int) -> None:
        note((1,), (1,), (log, length, *state, np.int32(number)))

    def launches() -> None:
        mark(1)
        graphs.loop(lambda: mark(2), device.kernels.goes_on, 6)
        mark(3)

    device.tree.set("draft_ids", [17])
    device.kernels.begin(NUM_ROWS, 9)
    with cuda.stream:
        mark(0)  # loads the kernel
        device.kernels.goes_on(np.uint64(0))
        graphs.add("all", launches)
        for turn in (1, 2):
            device.kernels.begin(NUM_ROWS, 9)
            length.fill(0)
            graphs.run("all")
            cuda.sync()
            assert cuda.numpy(log)[: int(cuda.numpy(length)[0])].tolist() == expected, turn
    graphs.close()
