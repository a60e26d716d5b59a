"""step.cu and the sampler, over many steps, against the bookkeeping of the reference executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpmrt.config import Sampling
from cpmrt.cuda.step import structs as ss
from cpmrt.cuda.step.commands import command_bytes, write_certain, write_slots, write_step
from cpmrt.cuda.step.rings import WithCertain, answered_tokens, step_result
from cpmrt.dtypes import DType
from cpmrt.executor import Admit, Decode, Prefill, Recall, Release, SlotResult, Step, StepResult
from cpmrt.memory.caches import CacheLayout
from cpmrt.ops import Rows
from cpmrt.reference.executor import Done, ReferenceExecutor

VOCAB, HIDDEN, SLOTS, CHUNK, PAGES = 64, 64, 4, 8, 5
CONTEXT = 64 * PAGES
LAYOUT = CacheLayout((), CONTEXT, SLOTS)


def logits_after(token: int, position: int) -> Any:
    """Return made-up logits, a function of the row's token and position."""
    values = np.random.default_rng([token, position]).standard_normal(VOCAB) * 3
    return values.astype(np.float32)


class Bookkeeping(ReferenceExecutor):
    """The reference executor with `logits_after` as its model; `rows` holds the rows of the last forward."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB)  # type: ignore[assignment]
        self._running, self._closed = {}, False
        self._layout, self.block_tables = LAYOUT, np.array(LAYOUT.block_tables(), np.int32)
        self._capacities, self._drafter = np.full(SLOTS, CONTEXT), None
        self._arrays = {"logits": np.zeros((ss.MAX_ROWS, VOCAB), np.float32)}
        self.rows: list[tuple[int, int, int]] = []

    def _forward(self, rows: Rows, logit_rows: Any, logits: Any) -> None:
        columns = (rows.token_ids, rows.positions, rows.slots)
        self.rows = list(zip(*(column.tolist() for column in columns), strict=True))
        for index, row in enumerate([] if logit_rows is None else np.arange(len(self.rows))[logit_rows]):
            logits[index] = logits_after(*self.rows[row][:2])


class DeviceSteps:
    """Launches the kernels of steps in the order of the CUDA executor, without the forward. The rings are in device
    memory."""

    def __init__(
        self, cuda: Any, *, bucket: int = CHUNK, decode_rows: int = 8, pdl: bool = False, drafts: bool = False
    ):
        self.cuda, self.bucket, self.decode_rows, self.pdl = cuda, bucket, decode_rows, pdl
        self.number, self.stride = 0, command_bytes(CHUNK, PAGES)
        zeros: dict[str, Any] = {
            "states": np.zeros(SLOTS * ss.SLOT_STATE.itemsize, np.uint8),
            "counts": np.full((SLOTS, VOCAB), 0x7FFF, np.uint32),
            "block_tables": np.array(LAYOUT.block_tables(), np.int32),
            "results": np.zeros(ss.RING_ENTRIES * ss.RESULT_RECORD.itemsize, np.uint8),
            "context": np.zeros(ss.STEP_CONTEXT.itemsize, np.uint8),
            "chunk": np.full(4, -9, np.int32),
        }
        tables = {
            "history": np.full((SLOTS, CONTEXT), -9, np.int32),
            "capacities": np.full(SLOTS, CONTEXT, np.int32),
            "carry_counts": np.full(SLOTS, 5, np.int32),
        }
        self.on_device = {name: cuda.array(values) for name, values in zeros.items()}
        self.on_device |= {name: cuda.array(values) if drafts else None for name, values in tables.items()}
        self.commands = np.zeros(ss.RING_ENTRIES * self.stride, np.uint8)
        self.logprobs = [0] * SLOTS
        self.rows: list[tuple[int, int, int]] = []

    def launch(self, name: str, grid: Any, block: int, *args: Any) -> None:
        sizes = {"VOCAB": VOCAB, "PORTABLE": 1} if name == "sample" else {"VOCAB": VOCAB, "HIDDEN": HIDDEN}
        arguments = [self.on_device[arg] if isinstance(arg, str) else arg for arg in args]
        self.cuda.kernel(name, DType.BFLOAT16, **sizes)(grid, block, *arguments, pdl=self.pdl)

    def begin(self, name: str, block: int, outputs: list[str], write: Callable[[Any], None], *sizes: int) -> None:
        at = self.number % ss.RING_ENTRIES * self.stride
        write(self.commands[at : at + self.stride])
        self.number += 1
        for column in ("token_ids", "positions", "slots", "sampled_slots"):
            self.on_device[column] = self.cuda.array(np.full(ss.MAX_ROWS, -9, np.int32))
        ring = self.cuda.array(self.commands)
        self.launch(name, 1, block, *outputs, "context", ring, np.int32(self.stride), *map(np.int32, sizes))

    def submit(self, step: Step) -> list[SlotResult]:
        if isinstance(step, Admit):
            outputs = ["states", "counts", "block_tables", "capacities", "carry_counts", "results"]
            self.begin("admit", 1024, outputs, lambda entry: write_step(entry, step, VOCAB), PAGES)
            self.logprobs[step.slot] = step.sampling.logprobs
            assert self.answers([step.slot]) == [SlotResult()]
            return []
        if isinstance(step, Recall):
            outputs = ["states", "counts", "history", "results"]
            self.begin("recall", 1024, outputs, lambda entry: write_step(entry, step, VOCAB), CONTEXT)
            assert self.answers([step.slot]) == [SlotResult()]
            return []
        if isinstance(step, Prefill):
            return self.prefill(step)
        return self.decode(step) if isinstance(step, Decode) else []

    def prefill(self, step: Prefill) -> list[SlotResult]:
        outputs = ["token_ids", "positions", "slots", "chunk", "states", "counts", "history"]
        sizes = (CONTEXT, self.bucket)
        self.begin("prefill_begin", 1024, outputs, lambda entry: write_step(entry, step, VOCAB), *sizes)
        self.rows = self.rows_of(self.bucket)
        chunk = self.cuda.numpy(self.on_device["chunk"]).tolist()
        assert chunk == [step.slot, step.position, len(step.token_ids), int(step.is_last)]
        self.launch("prefill_end", 1, 32, "results", "chunk", "context")
        if step.is_last:
            self.sample([self.used()[-1]])
        return self.answers([step.slot])

    def decode(self, step: Decode) -> list[SlotResult]:
        if step.certain:
            return self.decode_certain(step)
        outputs = ["token_ids", "positions", "slots", "states", "history", "results"]
        sizes = (CONTEXT, self.decode_rows)
        self.begin("step_begin", 64, outputs, lambda entry: write_slots(entry, ss.DECODE, step.slots), *sizes)
        self.rows = self.rows_of(self.decode_rows)
        self.sample(self.rows)
        return self.answers(list(step.slots))

    def decode_certain(self, step: Decode) -> list[SlotResult]:
        outputs = ["token_ids", "positions", "slots", "sampled_slots", "states", "counts", "history", "results"]
        sizes = (CONTEXT, self.decode_rows)
        self.begin("certain_begin", 64, outputs, lambda entry: write_certain(entry, *brought(step), VOCAB), *sizes)
        self.rows = self.rows_of(self.decode_rows)
        sampled = self.cuda.numpy(self.on_device["sampled_slots"])[: self.decode_rows].tolist()
        last = [slot if [slot] != following else -1 for (*_, slot), following in zip(self.rows, [
            *([row[2]] for row in self.rows[1:]), []], strict=True)]  # fmt: skip
        assert sampled == last
        self.sample(self.rows, "sampled_slots")
        rows = self.answers([slot for slot, tokens in zip(*brought(step), strict=True) for _ in (-1, *tokens)])
        return list(WithCertain(Done(StepResult(tuple(rows))), step.certain).wait().slots)

    def sample(self, rows: list[tuple[int, int, int]], slots: str = "slots") -> None:
        logits = np.full((len(rows), VOCAB), np.nan, np.float32)
        for index, (token, position, slot) in enumerate(rows):
            if slot >= 0:
                logits[index] = logits_after(token, position)
        device_logits = self.cuda.array(logits)
        self.launch("sample", (1, len(rows)), 512, "results", "states", "counts", device_logits, slots, "context")

    def rows_of(self, count: int) -> list[tuple[int, int, int]]:
        columns = [self.cuda.numpy(self.on_device[name]) for name in ("token_ids", "positions", "slots")]
        assert all((column[count:] == -9).all() for column in columns), "rows past the step's were written"
        return [tuple(map(int, row)) for row in zip(*(column[:count] for column in columns), strict=True)]  # type: ignore[misc]

    def used(self) -> list[tuple[int, int, int]]:
        unused = [row for row in self.rows if row[2] < 0]
        assert unused == [(0, 0, -1)] * len(unused)
        return [row for row in self.rows if row[2] >= 0]

    def answers(self, slots: list[int]) -> list[SlotResult]:
        records = np.ascontiguousarray(self.cuda.numpy(self.on_device["results"])).view(ss.RESULT_RECORD)
        record = records[(self.number - 1) % ss.RING_ENTRIES]
        tokens = answered_tokens(memoryview(record["words"]), self.number, len(slots))
        assert tokens is not None
        return list(step_result(tokens, record, tuple(self.logprobs[slot] for slot in slots)).slots)


def brought(step: Decode) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    return step.slots, step.certain


def random_sampling(rng: np.random.Generator) -> Sampling:
    biases = {int(token): float(rng.normal() * 3) for token in rng.integers(0, VOCAB + 9, rng.choice([0, 6]))}
    return Sampling(
        temperature=float(rng.choice([0.0, 0.8])), top_k=int(rng.choice([0, 12])),
        repetition_penalty=float(rng.choice([1.0, 1.3])), presence_penalty=float(rng.choice([0.0, 0.5])),
        frequency_penalty=float(rng.choice([0.0, 0.4])), logprobs=int(rng.choice([0, 2])),
        logit_bias=tuple(sorted(biases.items())),
    )  # fmt: skip


def program(seed: int, num_sequences: int) -> Iterator[Step]:
    """Yield steps of sequences that come and go in random slots; decode steps go on with sequences that have
    finished."""
    rng = np.random.default_rng(seed)
    ready: list[int] = []
    for _ in range(num_sequences):
        slot = int(rng.integers(SLOTS))
        if slot in ready:
            ready.remove(slot)
            yield Release(slot)
        stops = tuple(int(token) for token in rng.integers(0, VOCAB, rng.choice([0, 3, 32])))
        pages = tuple(rng.permutation(SLOTS * PAGES)[: rng.integers(PAGES + 1)].tolist())
        yield Admit(slot, random_sampling(rng), int(rng.integers(2**63)), int(rng.integers(1, 12)), stops, pages)
        if rng.random() < 0.5:
            yield Recall(slot, tuple(rng.integers(0, VOCAB, rng.integers(1, CHUNK + 1)).tolist()))
        prompt = tuple(int(token) for token in rng.integers(0, VOCAB, rng.integers(1, 3 * CHUNK)))
        for start in range(0, len(prompt), CHUNK):
            yield Prefill(slot, prompt[start : start + CHUNK], start, start + CHUNK >= len(prompt))
            if ready and rng.random() < 0.5:
                yield Decode(tuple(ready))
        ready.append(slot)
        rng.shuffle(ready)
        for _ in range(int(rng.integers(2, 9))):
            yield Decode(tuple(ready))


def check(got: list[SlotResult], expected: tuple[SlotResult, ...]) -> None:
    assert [result.token_ids for result in got] == [result.token_ids for result in expected]
    for ours, theirs in zip(got, expected, strict=True):
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]
            np.testing.assert_allclose(mine.logprob, other.logprob, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_steps_follow_the_reference_executor(cuda: Any, seed: int, pdl: bool) -> None:
    reference, device = Bookkeeping(), DeviceSteps(cuda, pdl=pdl)
    surplus = tokens = 0
    for step in program(seed, num_sequences=12):
        reference.rows = device.rows = []
        expected = reference.submit(step).wait().slots
        check(device.submit(step), expected)
        assert device.used() == reference.rows, step
        tokens += sum(len(result.token_ids) for result in expected)
        surplus += sum(not result.token_ids for result in expected) if isinstance(step, Decode) else 0
    assert device.number > 2 * ss.RING_ENTRIES and tokens > 20 and surplus > 0
    states = np.ascontiguousarray(cuda.numpy(device.on_device["states"])).view(ss.SLOT_STATE)
    counts = cuda.numpy(device.on_device["counts"])
    np.testing.assert_array_equal(cuda.numpy(device.on_device["block_tables"]), reference.block_tables)
    for slot, running in reference._running.items():
        state = states[slot]
        for name in ("position", "last_token", "num_generated", "finished"):
            assert state[name] == getattr(running, name), (slot, name)
        expected = np.where(running.seen, ss.SEEN, 0) | running.counts.astype(np.uint32)
        biased = [token for token, _ in running.admit.sampling.logit_bias if token < VOCAB]
        expected[biased] |= ss.BIASED
        np.testing.assert_array_equal(counts[slot], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("decode_rows", [8, 16, 64])
@pytest.mark.parametrize("drafts", [False, True])
def test_slots_bring_certain_tokens(cuda: Any, decode_rows: int, drafts: bool) -> None:
    """Slots bring certain tokens beside each other, beside slots that bring none, and beside one that has finished."""
    rng = np.random.default_rng(decode_rows)
    reference, device = Bookkeeping(), DeviceSteps(cuda, decode_rows=decode_rows, drafts=drafts)
    new = [300, 300, 1, 300]
    steps: list[Step] = [Admit(slot, random_sampling(rng), slot, new[slot], ()) for slot in range(SLOTS)]
    steps += [Prefill(slot, (slot + 1, 5, 5), 0, True) for slot in range(SLOTS)]
    for number in range(9):
        slots = tuple(rng.permutation(SLOTS)[: 1 + number % SLOTS].tolist())
        cuts = np.sort(rng.integers(0, decode_rows - len(slots) + 1, len(slots)))
        counts = np.diff(cuts, prepend=0) if number % 3 else np.diff(cuts, append=cuts[-1])
        certain = tuple(tuple(rng.integers(0, VOCAB, min(count, 31)).tolist()) for count in counts)
        steps.append(Decode(slots, certain=certain if any(certain) else ((), *certain[1:])))
    tokens: dict[int, list[int]] = {slot: [slot + 1, 5, 5] for slot in range(SLOTS)}
    for step in steps:
        reference.rows = device.rows = []
        expected = reference.submit(step).wait().slots
        check(device.submit(step), expected)
        assert device.used() == reference.rows, step
        for slot, result in zip(getattr(step, "slots", (getattr(step, "slot", 0),)), expected, strict=False):
            tokens[slot] += result.token_ids
    states = np.ascontiguousarray(cuda.numpy(device.on_device["states"])).view(ss.SLOT_STATE)
    for slot, running in reference._running.items():
        for name in ("position", "last_token", "num_generated", "finished"):
            assert states[slot][name] == getattr(running, name), (slot, name)
        seen = cuda.numpy(device.on_device["counts"])[slot] & ~ss.BIASED
        np.testing.assert_array_equal(seen, np.where(running.seen, ss.SEEN, 0) | running.counts.astype(np.uint32))
        if drafts:
            known = running.position
            assert cuda.numpy(device.on_device["history"])[slot, :known].tolist() == tokens[slot][:known]
    assert max(len(found) for found in tokens.values()) > 15


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [4, 5])
def test_a_history_holds_what_stands_before_the_newest_token(cuda: Any, seed: int) -> None:
    reference, device = Bookkeeping(), DeviceSteps(cuda, drafts=True)
    tokens: dict[int, list[int]] = {}
    capacities = [CONTEXT] * SLOTS
    for step in program(seed, num_sequences=10):
        results = reference.submit(step).wait().slots
        check(device.submit(step), results)
        if isinstance(step, Admit):
            tokens[step.slot] = []
            capacities[step.slot] = 64 * len(step.block_table) or capacities[step.slot]
            assert device.cuda.numpy(device.on_device["carry_counts"])[step.slot] == 0
        elif isinstance(step, Prefill):
            tokens[step.slot] += step.token_ids
        elif isinstance(step, Recall):
            history = device.cuda.numpy(device.on_device["history"])[step.slot]
            assert tuple(history[: len(step.token_ids)]) == step.token_ids
        slots = step.slots if isinstance(step, Decode) else (getattr(step, "slot", 0),)
        for slot, result in zip(slots, results, strict=False):
            tokens[slot] += result.token_ids
    history = device.cuda.numpy(device.on_device["history"])
    for slot, running in reference._running.items():
        known = running.position
        assert known > 0 and history[slot, :known].tolist() == tokens[slot][:known]
    assert device.cuda.numpy(device.on_device["capacities"]).tolist() == capacities


@pytest.mark.gpu
@pytest.mark.parametrize("decode_rows", [1, 2, 32, 64])
def test_a_step_fits_every_number_of_rows(cuda: Any, decode_rows: int) -> None:
    reference, device = Bookkeeping(), DeviceSteps(cuda, bucket=CHUNK + 3, decode_rows=decode_rows)
    slots = tuple(range(min(decode_rows, SLOTS)))[::-1]
    steps: list[Step] = [Admit(slot, Sampling(temperature=1.0), slot, 9, ()) for slot in slots]
    steps += [Prefill(slot, (slot + 1, 5, 5), 0, True) for slot in slots] + [Decode(slots)] * 3
    for step in steps:
        reference.rows = device.rows = []
        check(device.submit(step), reference.submit(step).wait().slots)
        assert device.used() == reference.rows


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_head_gets_the_last_row_of_the_chunk(cuda: Any, count: int) -> None:
    x = np.random.default_rng(0).standard_normal((7, HIDDEN)).astype(np.float32)
    device_x, chunk = cuda.array(x, DType.FLOAT16), cuda.array(np.array([0, 0, count, 1], np.int32))
    before = cuda.numpy(device_x, DType.FLOAT16)
    kernel = cuda.kernel("first_begin", DType.FLOAT16, VOCAB=VOCAB, HIDDEN=HIDDEN)
    kernel(1, 128, device_x, chunk)
    after = cuda.numpy(device_x, DType.FLOAT16)
    np.testing.assert_array_equal(after[0], before[count - 1])
    np.testing.assert_array_equal(after[1:], before[1:])


@pytest.mark.gpu
def test_results_reach_the_host_through_mapped_memory(cuda: Any) -> None:
    from cpmrt.cuda.driver.host_memory import HostBuffer

    device = DeviceSteps(cuda)
    size = ss.RING_ENTRIES * ss.RESULT_RECORD.itemsize
    with HostBuffer(size) as results, HostBuffer(ss.RING_ENTRIES * device.stride) as commands:
        device.on_device["results"] = np.uint64(results.device_address)
        write_step(commands.array(np.uint8)[: device.stride], Admit(1, Sampling(), 0, 1, ()), VOCAB)
        ring = np.uint64(commands.device_address)
        outputs = ("states", "counts", "block_tables", "capacities", "carry_counts", "results", "context")
        device.launch("admit", 1, 1024, *outputs, ring, np.int32(device.stride), np.int32(PAGES))
        cuda.sync()
        record = results.array(ss.RESULT_RECORD)[0]
        assert answered_tokens(memoryview(record["words"]), 1, 1) == [ss.NO_TOKEN]
