"""Commands: a step as the bytes that the device takes from an entry of the command ring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpmrt.cuda.step.structs import (
    ADMIT,
    COMMAND,
    DECODE_CERTAIN,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    PREFILL,
    RECALL,
    SLOT_STATE,
)
from cpmrt.dtypes import Array
from cpmrt.errors import RequestError
from cpmrt.executor import MAX_ROWS, Admit, Prefill, Recall


def command_bytes(prefill_chunk: int, pages_per_sequence: int) -> int:
    """Return the bytes of an entry of the command ring: a header, then a slot's state and block table, or MAX_ROWS
    slots with a token each, or a chunk."""
    payload = max(SLOT_STATE.itemsize + 4 * pages_per_sequence, 8 * MAX_ROWS, 4 * prefill_chunk)
    return -(-(COMMAND.itemsize + payload) // 64) * 64


def write_slots(entry: Array, kind: int, slots: Sequence[int]) -> None:
    """Write a command that only names sequences, of kind DECODE, SPECULATE or CATCH_UP.

    `entry`, here and below, is a uint8 view of the bytes of an entry.
    """
    _write_header(entry, kind, len(slots), slots[0])
    entry[COMMAND.itemsize :].view(np.int32)[: len(slots)] = slots


def write_certain(entry: Array, slots: Sequence[int], certain: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Write the command of a decode step whose slots bring certain tokens: for each slot a row with -1, which stands
    for its last token, and a row for each certain token. Raises RequestError as `write_step` does."""
    rows = [(slot, token) for slot, tokens in zip(slots, certain, strict=True) for token in (-1, *tokens)]
    _checked_tokens([token for tokens in certain for token in tokens], vocab_size)
    _write_header(entry, DECODE_CERTAIN, len(rows), slots[0])
    entry[COMMAND.itemsize :].view(np.int32)[: 2 * len(rows)] = np.ravel(rows)


def write_step(entry: Array, step: Admit | Recall | Prefill, vocab_size: int) -> None:
    """Write the command of a step that brings a slot's state and pages, or tokens.

    Raises RequestError for what the device cannot hold, before a byte is written: more stop ids or biases than fit, and
    a token id that the model does not have, with which the device would read past its tables.
    """
    payload = entry[COMMAND.itemsize :]
    if isinstance(step, Admit):
        state, table, size = slot_state(step), step.block_table, SLOT_STATE.itemsize
        _write_header(entry, ADMIT, len(table), step.slot)
        payload[:size] = np.frombuffer(state.tobytes(), np.uint8)
        payload[size:].view(np.int32)[: len(table)] = table
        return
    tokens = _checked_tokens(step.token_ids, vocab_size)
    if isinstance(step, Prefill):
        _write_header(entry, PREFILL, len(tokens), step.slot, step.position, step.is_last)
    else:
        _write_header(entry, RECALL, len(tokens), step.slot)
    payload.view(np.int32)[: len(tokens)] = tokens


def slot_state(step: Admit) -> Array:
    """Return the SLOT_STATE of a new sequence. Raises RequestError for more stop ids or biases than fit."""
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
    # Only a top_p of 1 in float64 is off, as in the NumPy executor: a value just below must not become 1 in float32.
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
