"""sampling.cu against the definition in reference/sampling.py: tokens, log-probabilities, the slot's new state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cpmrt.config import Sampling
from cpmrt.cuda.step.commands import slot_state
from cpmrt.cuda.step.rings import step_result
from cpmrt.cuda.step.structs import (
    BIASED,
    NO_TOKEN,
    RESULT_RECORD,
    RING_ENTRIES,
    SEEN,
    STEP_CONTEXT,
)
from cpmrt.dtypes import DType
from cpmrt.executor import Admit, SlotResult
from cpmrt.reference.philox import gumbel
from cpmrt.reference.sampling import biased, is_usable, keep_mask, penalise, sample, token_logprobs

# The oracle subtracts infinities where a row is masked.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]

THREADS = 512
SEQUENCE = 2**32 + 21  # past 32 bits: result words hold its low half
POISON = 0xDEAD_BEEF_0000_0000


@dataclass
class Row:
    """One row of logits with everything that decides its token."""

    logits: Any
    params: Sampling
    seed: int
    position: int
    seen: Any
    counts: Any
    stop_token_ids: tuple[int, ...] = ()
    num_generated: int = 0
    max_new_tokens: int = 1000

    @property
    def token(self) -> int:
        return sample(self.logits, self.params, self.seed, self.position, self.seen, self.counts)

    def is_decided(self) -> bool:
        """Return whether no rounding, of a logarithm in the noise or of a sum of probabilities, can change the
        token."""
        z = penalise(biased(self.logits, self.params.logit_bias), self.params, self.seen, self.counts)
        if self.params.temperature == 0:
            return True
        z = z / np.float32(self.params.temperature)
        keep = keep_mask(z, self.params)
        values = np.sort(np.where(keep, z + gumbel(self.seed, self.position, len(z)), -np.inf))
        if keep.sum() > 1 and not values[-1] - values[-2] > 1e-4 * max(1.0, abs(values[-1])):
            return False
        return self.params.top_p >= 1 or self.is_top_p_decided(z)

    def is_top_p_decided(self, z: Any) -> bool:
        """Return whether sums in float64 cross top_p, a little less and a little more at the same logit."""
        only_k = Sampling(temperature=1.0, top_k=self.params.top_k)
        kept = -np.sort(-z[keep_mask(z, only_k)])
        mass = np.cumsum(np.exp(kept.astype(np.float64) - kept[0]))
        goals = np.float64(np.float32(self.params.top_p)) * mass[-1] * (1 + np.array([-1e-4, 0, 1e-4]))
        crossings = kept[np.minimum(np.searchsorted(mass, goals), len(kept) - 1)]
        both = Sampling(temperature=1.0, top_k=self.params.top_k, top_p=self.params.top_p)
        return bool((crossings == z[keep_mask(z, both)].min()).all())


@dataclass
class Launched:
    """The slot states, token counts, result records and rows' results after a launch."""

    states: Any
    counts: Any
    records: Any
    rows: list[SlotResult] = field(default_factory=list)


def launch(
    cuda: Any, rows: list[Row], *, slots: list[int] | None = None, portable: bool = False, pdl: bool = False
) -> Launched:
    """Sample `rows`; row i belongs to slot i unless `slots` says otherwise (-1: padding)."""
    vocab = len(rows[0].logits)
    kernel = cuda.kernel("sample", DType.BFLOAT16, VOCAB=vocab, PORTABLE=int(portable))
    slots = list(range(len(rows))) if slots is None else slots
    num_slots = max(slots) + 2
    states, counts = np.zeros(num_slots, slot_state(admit(rows[0])).dtype), np.zeros((num_slots, vocab), np.uint32)
    states["last_token"] = -7
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            states[slot] = slot_state(admit(row))
            states[slot]["position"], states[slot]["num_generated"] = row.position, row.num_generated
            counts[slot] = np.where(row.seen, SEEN, 0) | row.counts.astype(np.uint32)
            counts[slot, [token for token, _ in row.params.logit_bias if token < vocab]] |= BIASED
    context = np.zeros(1, STEP_CONTEXT)
    context["next_entry"] = context["sequence"] = SEQUENCE
    words = np.full(RING_ENTRIES * RESULT_RECORD.itemsize // 8, POISON, np.uint64)
    arrays = [cuda.array(a.view(np.uint8).reshape(-1)) for a in (words, states, counts)]
    logits = cuda.array(np.stack([row.logits for row in rows]))
    in_clusters = int(cuda.arch.removeprefix("sm_").rstrip("af")) >= 90 and not portable
    grid = (8 if in_clusters else 1, len(rows))
    kernel(grid, THREADS, *arrays, logits, cuda.array(np.array(slots, np.int32)), context_of(cuda, context), pdl=pdl)
    raw = [np.ascontiguousarray(cuda.numpy(array)) for array in arrays]
    records = raw[0].view(RESULT_RECORD)
    record = records[(SEQUENCE - 1) % RING_ENTRIES]
    tokens = (record["words"] & np.uint64(NO_TOKEN)).tolist()
    results = step_result(tokens[: len(rows)], record, tuple(row.params.logprobs for row in rows)).slots
    done = [result for result, slot in zip(results, slots, strict=True) if slot >= 0]
    return Launched(raw[1].view(states.dtype), raw[2].view(np.uint32).reshape(counts.shape), records, done)


def context_of(cuda: Any, context: Any) -> Any:
    return cuda.array(context.view(np.uint8))


def admit(row: Row) -> Admit:
    return Admit(0, row.params, row.seed, row.max_new_tokens, row.stop_token_ids)


def logits_of(kind: str, vocab: int, rng: np.random.Generator) -> Any:
    values = rng.standard_normal(vocab)
    shapes = {
        "peaked": values * 3,
        "flat": values * 0.05,
        "ties": np.round(values * 4) / 4,
        "equal": np.full(vocab, 1.5),
        "one": np.where(np.arange(vocab) == vocab // 3, 40.0, values),
        "far": np.where(np.arange(vocab) == vocab // 3, 12.0, values * 0.3),  # most of the probability is far below
        "masked": np.where(rng.random(vocab) < 0.6, -np.inf, values * 2),
        "wide": values * 400,
        "large": 1e6 + np.round(values * 8),
        "negative": values * 2 - 50,
        "around zero": values * 1e-5,
    }
    return shapes[kind].astype(np.float32)


KINDS = ("peaked", "flat", "ties", "equal", "one", "far", "masked", "wide", "large", "negative", "around zero")


def random_rows(vocab: int, seed: int, count: int = 64, logprobs: int = 0) -> list[Row]:
    """Return rows with every mix of filters; about one in five is greedy."""
    rng = np.random.default_rng(seed)
    top_ks = (0, 0, 1, 2, 5, 50, vocab // 2, vocab - 1, vocab, 3 * vocab)
    rows = []
    for index in range(count):
        params = Sampling(
            temperature=float(rng.choice([0, 0.6, 1.0, 1.0, 1.7])),
            top_k=int(rng.choice(top_ks)),
            top_p=float(rng.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.95, 0.999])),
            min_p=float(rng.choice([0.0, 0.0, 0.0, 0.02, 0.3, 1.0])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.2, 0.8])),
            presence_penalty=float(rng.choice([0.0, 0.0, 0.7])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.3, -0.1])),
            logprobs=logprobs,
            logit_bias=random_biases(vocab, np.random.default_rng([seed, index])),
        )
        counts = np.where(rng.random(vocab) < 0.05, rng.integers(1, 9, vocab), 0).astype(np.int32)
        seen = (counts > 0) | (rng.random(vocab) < 0.1)
        logits = logits_of(KINDS[index % len(KINDS)], vocab, rng)
        position = int(rng.integers(0, 2**20))
        rows.append(Row(logits, params, int(rng.integers(0, 2**63)) * 2 + 1, position, seen, counts))
    return rows


def random_biases(vocab: int, rng: np.random.Generator) -> tuple[tuple[int, float], ...]:
    """Return logit biases: mostly none, else one, a few or as many as are allowed, some of them for tokens that the
    model lacks."""
    count = int(rng.choice([0, 0, 0, 1, 7, 300]))
    tokens = rng.choice(vocab + 400, count, replace=False)
    biases = zip(tokens.tolist(), rng.normal(0, 5, count).tolist(), strict=True)
    return tuple(sorted(biases))


def simple_row(logits: Any, *, max_new_tokens: int = 1000, **settings: Any) -> Row:
    vocab = len(logits)
    params = Sampling(**settings)
    seen, counts = np.zeros(vocab, bool), np.zeros(vocab, np.int32)
    return Row(np.asarray(logits, np.float32), params, 5, 9, seen, counts, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("vocab", [4, 5, 997, 4096, 73448])
def test_tokens_are_the_definitions(cuda: Any, vocab: int, portable: bool) -> None:
    decided = 0
    for seed in range(2 if vocab > 10_000 else 5):
        rows = random_rows(vocab, seed)
        for index, (row, got) in enumerate(zip(rows, launch(cuda, rows, portable=portable).rows, strict=True)):
            if not is_usable(row.logits):
                assert got == SlotResult(non_finite=True), index
            elif row.is_decided():
                decided += 1
                assert got.token_ids == (row.token,), f"row {index} ({KINDS[index % len(KINDS)]}): {row.params}"
    assert decided > 100


@pytest.mark.all
@pytest.mark.parametrize("vocab", [151_936, 200_003])
def test_large_vocabularies(cuda: Any, vocab: int) -> None:
    rows = random_rows(vocab, 3, count=20)
    got = launch(cuda, rows).rows
    checked = [(row.token, result.token_ids[0]) for row, result in zip(rows, got, strict=True) if row.is_decided()]
    assert len(checked) > 8
    assert all(expected == token for expected, token in checked)


@pytest.mark.parametrize("vocab", [5, 997, 73448])
def test_the_lowest_id_wins_a_greedy_tie(cuda: Any, vocab: int) -> None:
    logits = np.full(vocab, -3.0, np.float32)
    logits[[vocab - 1, vocab // 2, vocab - 3]] = 2.0
    signed_zeros = np.where(np.arange(vocab) == 1, -0.0, np.where(np.arange(vocab) > 2, 0.0, -1.0))
    rows = [simple_row(logits), simple_row(np.zeros(vocab)), simple_row(signed_zeros)]
    got = [result.token_ids[0] for result in launch(cuda, rows).rows]
    assert got == [vocab // 2 if vocab > 5 else 2, 0, 1]


def test_equal_logits_leave_the_choice_to_the_noise(cuda: Any) -> None:
    vocab = 1003
    rows = []
    for position in range(64):
        row = simple_row(np.zeros(vocab), temperature=1.0, top_p=0.3)  # ties stay together: top_p drops nothing
        row.position, row.seed = position * 7919, 2**64 - 1 - position
        rows.append(row)
    expected = [int(np.argmax(gumbel(row.seed, row.position, vocab))) for row in rows]
    assert [result.token_ids[0] for result in launch(cuda, rows).rows] == expected
    assert len(set(expected)) > 50


def near_ties(vocab: int, count: int, gap: float) -> Iterator[tuple[Row, int]]:
    """Yield rows and their tokens: two tokens' values, noise added, are `gap` apart. One thread or two have these
    tokens."""
    rng = np.random.default_rng(vocab)
    for position in range(count):
        noise = gumbel(5, position, vocab).astype(np.float64)
        first = int(rng.integers(vocab - 4096))
        second = first + int(rng.choice([1, 2, 4, 37, 2048, 4095]))
        logits = np.full(vocab, -40.0)
        logits[first] = 1.0
        logits[second] = 1.0 + noise[first] - noise[second] + gap
        row = simple_row(logits, temperature=1.0)
        row.position = position
        yield row, second if gap > 0 else first


@pytest.mark.parametrize("gap", [3e-5, -3e-5])
def test_the_better_of_two_that_are_nearly_equal(cuda: Any, gap: float) -> None:
    """The better of two tokens wins although the estimates of their values differ by less than an estimate's error."""
    pairs = [pair for pair in near_ties(73448, 200, gap) if abs(pair[0].logits).max() < 41]
    assert len(pairs) > 150
    for start in range(0, len(pairs), 64):
        part = pairs[start : start + 64]
        got = [result.token_ids[0] for result in launch(cuda, [row for row, _ in part]).rows]
        assert got == [token for _, token in part]


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 1e-30}, {"temperature": 1e-20}])
def test_large_logits_are_compared_exactly(cuda: Any, settings: dict[str, Any]) -> None:
    """Large logits are compared exactly: the error of their estimates exceeds their distance from each other."""
    vocab, rows = 4099, []
    for position in range(64):
        logits = np.full(vocab, -3e6)
        logits[[position, 999, 4000]] = 2e6, 2e6 + 1.25, 2e6 - 0.5
        row = simple_row(logits, **({"temperature": 1.0} | settings))
        row.position = position
        rows.append(row)
    got = [result.token_ids[0] for result in launch(cuda, rows).rows]
    assert [token for token, row in zip(got, rows, strict=True) if row.is_decided()] == [
        row.token for row in rows if row.is_decided()
    ]


@pytest.mark.parametrize("vocab", [5, 997, 73448])
@pytest.mark.parametrize("count", [1, 20])
def test_logprobs(cuda: Any, vocab: int, count: int) -> None:
    rows = random_rows(vocab, 11, count=20, logprobs=count)
    for row, result in zip(rows, launch(cuda, rows).rows, strict=True):
        (entry,) = result.logprobs
        expected = token_logprobs(row.logits, result.token_ids[0], count)
        assert entry.token_id == result.token_ids[0]
        np.testing.assert_allclose(entry.logprob, expected.logprob, rtol=1e-5, atol=2e-4)
        got, wanted = np.array(entry.top), np.array(expected.top)
        assert got.shape == (min(count, vocab), 2)
        np.testing.assert_allclose(got[:, 1], wanted[:, 1], rtol=1e-5, atol=2e-4)
        logits = row.logits[got[:, 0].astype(int)]
        np.testing.assert_allclose(logits, row.logits[wanted[:, 0].astype(int)], rtol=1e-5, atol=1e-4)
        order = list(zip(-got[:, 1], got[:, 0], strict=True))
        assert order == sorted(order) and len(set(got[:, 0])) == len(got)


@pytest.mark.parametrize("portable", [False, True])
def test_a_row_does_not_depend_on_the_others(cuda: Any, portable: bool) -> None:
    rows = random_rows(4099, 21, logprobs=3)
    together = launch(cuda, rows, portable=portable).rows
    for count in (1, 2, 5, 8, 12, 16, 31, 32):
        part = slice(64 - count, None)
        assert launch(cuda, rows[part], portable=portable).rows == together[part]


def test_clusters_and_pdl_change_nothing(cuda: Any) -> None:
    rows = random_rows(4099, 22, logprobs=2)
    expected = launch(cuda, rows).rows
    assert launch(cuda, rows, portable=True).rows == expected
    assert launch(cuda, rows, pdl=True).rows == expected


def with_state(row: Row, **changes: Any) -> Row:
    for name, value in changes.items():
        setattr(row, name, value)
    return row


def test_the_state_follows_the_token(cuda: Any) -> None:
    vocab = 600
    logits = np.arange(vocab, dtype=np.float32)  # greedy takes the last id
    stops = tuple(range(100, 131)) + (vocab - 1,)
    rows = [
        simple_row(logits),
        with_state(simple_row(logits), stop_token_ids=stops),
        with_state(simple_row(logits), stop_token_ids=stops[:-1]),
        with_state(simple_row(logits, max_new_tokens=4), num_generated=3),
        with_state(simple_row(logits, max_new_tokens=5), num_generated=3),
    ]
    rows[2].counts[vocab - 1], rows[2].seen[vocab - 1] = 6, True
    got = launch(cuda, rows)
    states = got.states[: len(rows)]
    assert states["last_token"].tolist() == [vocab - 1] * 5
    assert states["finished"].tolist() == [0, 1, 0, 1, 0]
    assert states["num_generated"].tolist() == [1, 1, 1, 4, 4]
    assert states["position"].tolist() == [9] * 5
    words = got.counts[: len(rows), vocab - 1]
    assert words.tolist() == [int(SEEN) + count for count in (1, 1, 7, 1, 1)]
    assert not got.counts[:, : vocab - 1].any()


def untouched(records: Any, used: list[int]) -> Iterator[bool]:
    entry = (SEQUENCE - 1) % RING_ENTRIES
    for index, record in enumerate(records):
        words = [word for row, word in enumerate(record["words"]) if index != entry or row not in used]
        yield all(int(word) == POISON for word in words)


def test_padding_rows_leave_everything_alone(cuda: Any) -> None:
    rows = random_rows(997, 31, count=5)
    rows[1].logits = np.full(997, np.nan, np.float32)
    got = launch(cuda, rows, slots=[2, -1, 0, -1, 5])
    alone = [launch(cuda, [rows[index]]).rows[0] for index in (0, 2, 4)]
    assert got.rows == alone
    assert [int(state["last_token"]) for state in got.states[[1, 3, 4, 6]]] == [-7] * 4
    assert not got.counts[[1, 3, 4, 6]].any()
    assert all(untouched(got.records, [0, 2, 4]))


def test_words_carry_the_low_half_of_the_number(cuda: Any) -> None:
    got = launch(cuda, [simple_row(np.arange(8))])
    word = int(got.records[(SEQUENCE - 1) % RING_ENTRIES]["words"][0])
    assert (word >> 32, word & NO_TOKEN) == (SEQUENCE & 0xFFFFFFFF, 7)


def test_a_row_that_is_not_finite_has_no_token_and_ends_its_sequence(cuda: Any) -> None:
    vocab = 997
    at_three = np.arange(vocab) == 3
    damaged = [
        np.full(vocab, np.nan), np.where(at_three, np.nan, 0.0), np.where(at_three, -np.nan, 0.0),
        np.where(at_three, np.inf, 0.0), np.full(vocab, -np.inf),
    ]  # fmt: skip
    healthy = np.where(at_three, 5.0, -np.inf)
    rows = [
        simple_row(values, temperature=temperature, top_k=top_k, top_p=top_p, logprobs=logprobs)
        for values in (*damaged, healthy)
        for temperature, top_k, top_p, logprobs in (
            (0.0, 0, 1.0, 0), (1.0, 40, 1.0, 2), (1.0, 0, 0.5, 0), (0.7, 40, 0.9, 0),
        )
    ]  # fmt: skip
    launched = launch(cuda, rows)
    assert [result.non_finite for result in launched.rows] == [True] * 20 + [False] * 4
    assert launched.rows[:20] == [SlotResult(non_finite=True)] * 20
    assert [result.token_ids for result in launched.rows[20:]] == [(3,)] * 4
    assert launched.states["finished"][:20].all() and not launched.states["finished"][20:24].any()
