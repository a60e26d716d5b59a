"""masked_sampling.cu against the definition in reference/sampling.py: masks of every kind, rows without a mask, rows
that get a code instead of a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.test_sampling import POISON, SEQUENCE, THREADS, Row, admit, context_of, random_rows

from cpmrt.cuda.step.commands import slot_state
from cpmrt.cuda.step.rings import step_result
from cpmrt.cuda.step.structs import (
    BIASED,
    NO_TOKEN,
    NON_FINITE,
    NOTHING_ALLOWED,
    RESULT_RECORD,
    RING_ENTRIES,
    SEEN,
    SLOT_STATE,
    STEP_CONTEXT,
)
from cpmrt.dtypes import DType
from cpmrt.reference.sampling import is_usable, masked, token_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]


def launch(
    cuda: Any, rows: list[Row], masks: list[bytes | None], *, portable: bool = False
) -> tuple[list[int], list[Any]]:
    """Sample `rows` under `masks` (None: any token), which are in place before the launch. Return the tokens, or codes
    instead of tokens, and the results of the rows that have a token."""
    vocab, mask_rows = len(rows[0].logits), len(rows) + 3
    kernel = cuda.kernel("sample_masked", DType.BFLOAT16, VOCAB=vocab, PORTABLE=int(portable))
    states, counts = np.zeros(len(rows), SLOT_STATE), np.zeros((len(rows), vocab), np.uint32)
    words = -(-vocab // 32)
    bits = np.full((RING_ENTRIES, mask_rows, words), 0xA5A5A5A5, np.uint32)
    ready = np.full((RING_ENTRIES, mask_rows), POISON, np.uint64)
    entry = (SEQUENCE - 1) % RING_ENTRIES
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        states[number] = slot_state(admit(row))
        states[number]["position"], states[number]["num_generated"] = row.position, row.num_generated
        counts[number] = np.where(row.seen, SEEN, 0) | row.counts.astype(np.uint32)
        counts[number, [token for token, _ in row.params.logit_bias if token < vocab]] |= BIASED
        ready[entry, number] = SEQUENCE << 2 | (1 if mask is None else 2)
        if mask is not None:
            padded = np.frombuffer(mask.ljust(4 * words, b"\0")[: 4 * words], np.uint32)
            bits[entry, number] = padded
    context = np.zeros(1, STEP_CONTEXT)
    context["next_entry"] = context["sequence"] = SEQUENCE
    record = np.full(RING_ENTRIES * RESULT_RECORD.itemsize // 8, POISON, np.uint64)
    arrays = [cuda.array(a.view(np.uint8).reshape(-1)) for a in (record, states, counts)]
    logits = cuda.array(np.stack([row.logits for row in rows]))
    slots = cuda.array(np.arange(len(rows), dtype=np.int32))
    in_clusters = int(cuda.arch.removeprefix("sm_").rstrip("af")) >= 90 and not portable
    grid = (8 if in_clusters else 1, len(rows))
    kernel(
        grid, THREADS, *arrays, logits, slots, context_of(cuda, context), cuda.array(ready), cuda.array(bits),
        np.int32(mask_rows), np.int32(words),
    )  # fmt: skip
    found = np.ascontiguousarray(cuda.numpy(arrays[0])).view(RESULT_RECORD)[entry]
    tokens = (found["words"] & np.uint64(NO_TOKEN)).tolist()[: len(rows)]
    sampled = [token if token < vocab else NO_TOKEN for token in tokens]
    return tokens, list(step_result(sampled, found, tuple(row.params.logprobs for row in rows)).slots)


def mask_of(kind: str, vocab: int, rng: np.random.Generator) -> bytes | None:
    allowed = {
        "any": None,
        "one": np.arange(vocab) == rng.integers(vocab),
        "few": np.isin(np.arange(vocab), rng.choice(vocab, 9)),
        "half": rng.random(vocab) < 0.5,
        "most": rng.random(vocab) < 0.99,
        "last": np.arange(vocab) == vocab - 1,
        "none": np.zeros(vocab, bool),
    }[kind]
    return None if allowed is None else np.packbits(allowed, bitorder="little").tobytes()


MASKS = ("any", "one", "few", "half", "most", "last", "none")


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("vocab", [99, 4096, 73448])
def test_tokens_are_the_definitions(cuda: Any, vocab: int, portable: bool) -> None:
    rng = np.random.default_rng(vocab)
    decided = 0
    for batch in range(3):
        rows = random_rows(vocab, batch, 64, logprobs=batch)
        masks = [mask_of(MASKS[number % len(MASKS)], vocab, rng) for number in range(len(rows))]
        told, results = launch(cuda, rows, masks, portable=portable)
        for row, mask, code, result in zip(rows, masks, told, results, strict=True):
            raw, row.logits = row.logits, masked(row.logits, mask)
            if not (is_usable(raw) and is_usable(row.logits)):
                are_numbers = mask is not None and np.max(raw) < np.inf
                assert code == (NOTHING_ALLOWED if are_numbers else NON_FINITE)
                continue
            (token,) = result.token_ids
            assert np.isfinite(row.logits[token]), "a token that the mask does not allow"
            if row.is_decided():
                decided += 1
                assert token == row.token
            if row.params.logprobs:
                expected = token_logprobs(raw, token, row.params.logprobs)
                assert result.logprobs[0].logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert decided > 60
