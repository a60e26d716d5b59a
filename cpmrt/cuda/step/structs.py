"""What a step leaves on the device and exchanges with the host, as `kernels_cu/include/slot_state.cuh` has it.

The host writes a command into a ring entry and launches; the kernels count entries by themselves. Every command is
answered by one word a row in the entry of the result ring with the same index: low half of the command's number (from 1
on) shifted left by 32, and a token id or NO_TOKEN. A word with the right number is complete, its log-probabilities too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.dtypes import Array
from cpmrt.errors import RequestError
from cpmrt.executor import Admit, Prefill, Recall, SlotResult, TokenLogprobs

_NO_RESULT = SlotResult()

MAX_STOP_IDS = 32
MAX_LOGIT_BIAS = 300
MAX_ROWS = 64
RING_ENTRIES = 16
"""Commands and results that may be outstanding: entry i may be written once command i - RING_ENTRIES is answered."""

SEEN, BIASED = np.uint32(0x80000000), np.uint32(0x40000000)
"""In a word of token_counts [B, V]: the token stands in the prompt or was generated; it has a logit bias. The rest
counts how often it was generated."""
NO_TOKEN = 0xFFFFFFFF
ADMIT, PREFILL, DECODE, RECALL, SPECULATE, CATCH_UP = range(1, 7)


def struct(alignment: int, *fields: tuple[Any, ...]) -> np.dtype[Any]:
    """A C struct whose fields leave no gaps but at its end."""
    packed = np.dtype(list(fields))
    size = -(-packed.itemsize // alignment) * alignment
    offsets = [packed.fields[name][1] for name in packed.names]  # type: ignore[index, union-attr]
    formats = [packed.fields[name][0] for name in packed.names]  # type: ignore[index, union-attr]
    return np.dtype({"names": list(packed.names or ()), "formats": formats, "offsets": offsets, "itemsize": size})


SLOT_STATE = struct(
    16,
    ("seed", "<u8"),
    ("last_token", "<i4"),
    ("position", "<i4"),
    ("num_generated", "<i4"),
    ("max_new_tokens", "<i4"),
    ("finished", "<i4"),
    ("top_k", "<i4"),
    ("temperature", "<f4"),
    ("top_p", "<f4"),
    ("log_min_p", "<f4"),
    ("repetition_penalty", "<f4"),
    ("presence_penalty", "<f4"),
    ("frequency_penalty", "<f4"),
    ("num_logprobs", "<i4"),
    ("num_stop_ids", "<i4"),
    ("stop_ids", "<i4", (MAX_STOP_IDS,)),
    ("num_logit_biases", "<i4"),
    ("biased_ids", "<i4", (MAX_LOGIT_BIAS,)),
    ("logit_biases", "<f4", (MAX_LOGIT_BIAS,)),
)
COMMAND = struct(
    16,
    ("kind", "<i4"),
    ("num_rows", "<i4"),
    ("slot", "<i4"),
    ("start", "<i4"),
    ("is_last", "<i4"),
    ("reserved", "<i4", (3,)),
)
TOKEN_LOGPROBS = struct(
    16,
    ("logprob", "<f4"),
    ("num_top", "<i4"),
    ("top_logprobs", "<f4", (MAX_LOGPROBS,)),
    ("top_ids", "<i4", (MAX_LOGPROBS,)),
)
RESULT_RECORD = struct(16, ("words", "<u8", (MAX_ROWS,)), ("logprobs", TOKEN_LOGPROBS, (MAX_ROWS,)))
STEP_CONTEXT = struct(16, ("next_entry", "<u8"), ("sequence", "<u8"), ("num_passed", "<i4"))


def command_bytes(prefill_chunk: int, pages_per_sequence: int) -> int:
    """Bytes of an entry of the command ring: a header, then a state and a table, MAX_ROWS slots or a chunk."""
    payload = max(SLOT_STATE.itemsize + 4 * pages_per_sequence, 4 * MAX_ROWS, 4 * prefill_chunk)
    return -(-(COMMAND.itemsize + payload) // 64) * 64


def slot_state(step: Admit) -> Array:
    """The state of a slot that nothing has run in yet. Raises RequestError for more stop ids or biases than fit."""
    stop_ids = sorted(set(step.stop_token_ids))
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(
            "too many stop token ids for the CUDA executor",
            expected=f"at most {MAX_STOP_IDS}, those of the model among them",
            actual=len(stop_ids),
            fix="stop on strings, or use executor='reference'",
        )
    sampling = step.sampling
    num_biases = len(sampling.logit_bias)
    if num_biases > MAX_LOGIT_BIAS:
        raise RequestError("too many entries of logit_bias", expected=f"at most {MAX_LOGIT_BIAS}", actual=num_biases)
    state = np.zeros((), SLOT_STATE)
    for name in ("top_k", "temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        state[name] = getattr(sampling, name)
    # As the oracle compares: top_p 1 in float64 is off, whatever float32 makes of a value just below it.
    state["top_p"] = min(sampling.top_p, float(np.nextafter(np.float32(1), np.float32(0)))) if sampling.top_p < 1 else 1
    state["log_min_p"] = np.log(np.float32(sampling.min_p)) if np.float32(sampling.min_p) > 0 else -np.inf
    state["seed"] = step.seed & (2**64 - 1)
    state["max_new_tokens"], state["num_logprobs"] = step.max_new_tokens, sampling.logprobs
    state["last_token"], state["num_stop_ids"] = -1, len(stop_ids)
    state["stop_ids"][: len(stop_ids)] = stop_ids
    if num_biases:
        state["num_logit_biases"] = num_biases
        state["biased_ids"][:num_biases], state["logit_biases"][:num_biases] = zip(*sampling.logit_bias, strict=True)
    return state


def write_admit(entry: Array, step: Admit) -> None:
    """`entry` is a uint8 view of a command's bytes; so in the functions below. Raises as slot_state does."""
    state, table, pages = slot_state(step), step.block_table, COMMAND.itemsize + SLOT_STATE.itemsize
    _write_header(entry, ADMIT, len(table), step.slot)
    entry[COMMAND.itemsize : pages] = np.frombuffer(state.tobytes(), np.uint8)
    entry[pages:].view(np.int32)[: len(table)] = table


def write_prefill(entry: Array, step: Prefill, vocab_size: int) -> None:
    """Raises RequestError for a token id that the model does not have: the device would read past its tables."""
    tokens = _checked_tokens(step.token_ids, vocab_size)
    _write_header(entry, PREFILL, len(tokens), step.slot, step.position, step.is_last)
    entry[COMMAND.itemsize :].view(np.int32)[: len(tokens)] = tokens


def write_recall(entry: Array, step: Recall, vocab_size: int) -> None:
    """Raises as write_prefill does."""
    tokens = _checked_tokens(step.token_ids, vocab_size)
    _write_header(entry, RECALL, len(tokens), step.slot)
    entry[COMMAND.itemsize :].view(np.int32)[: len(tokens)] = tokens


def write_decode(entry: Array, slots: Sequence[int]) -> None:
    """One row for each slot."""
    _write_header(entry, DECODE, len(slots))
    entry[COMMAND.itemsize :].view(np.int32)[: len(slots)] = slots


def write_speculate(entry: Array, slot: int) -> None:
    """Draft, verify and accept for the sequence in `slot`."""
    _write_header(entry, SPECULATE, 1, slot)


def write_catch_up(entry: Array, slot: int) -> None:
    """Let the draft see what it has not seen of the sequence in `slot`."""
    _write_header(entry, CATCH_UP, 1, slot)


def _checked_tokens(token_ids: Sequence[int], vocab_size: int) -> Array:
    tokens = np.array(token_ids, np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError("the prompt holds an unknown token id", expected=f"0 to {vocab_size - 1}", actual=wrong)
    return tokens


def _write_header(
    entry: Array, kind: int, num_rows: int, slot: int = -1, start: int = 0, is_last: bool = False
) -> None:
    header = entry[: COMMAND.itemsize].view(COMMAND)
    header[0] = (kind, num_rows, slot, start, is_last, (0, 0, 0))


def answered_tokens(words: memoryview, number: int, num_rows: int) -> list[int] | None:
    """Tokens, or NO_TOKEN, in the words of a result; None if not all belong to command `number` (from 1 on)."""
    tokens, mark = [], number & 0xFFFFFFFF
    for word in words[:num_rows].tolist():
        if word >> 32 != mark:
            return None
        tokens.append(word & NO_TOKEN)
    return tokens


def slot_result(token: int, record: Any, row: int, num_logprobs: int) -> SlotResult:
    """What a row of an answered command produced; `num_logprobs` as its sequence asked for."""
    if token == NO_TOKEN:
        return _NO_RESULT
    return SlotResult((token,), (_token_logprobs(token, record["logprobs"][row]),) if num_logprobs else ())


def path_result(tokens: list[int], record: Any, num_logprobs: int) -> SlotResult:
    """What an answered Speculate produced: `tokens` of its words, those that it did not emit at the end."""
    emitted = tuple([token for token in tokens if token != NO_TOKEN])
    if not num_logprobs:
        return SlotResult(emitted)
    entries = enumerate(emitted)
    return SlotResult(emitted, tuple([_token_logprobs(token, record["logprobs"][row]) for row, token in entries]))


def _token_logprobs(token: int, entry: Any) -> TokenLogprobs:
    count = int(entry["num_top"])
    top = tuple(zip(entry["top_ids"][:count].tolist(), entry["top_logprobs"][:count].tolist(), strict=True))
    return TokenLogprobs(token, float(entry["logprob"]), top)
