"""The structs that a step leaves on the device and exchanges with the host, as `slot_state.cuh` declares them."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.executor import MAX_ROWS

MAX_STOP_IDS = 32
MAX_LOGIT_BIAS = 300
RING_ENTRIES = 16
"""Commands and results that may be outstanding: entry i may be written once command i - RING_ENTRIES is answered."""

SEEN, BIASED = np.uint32(0x80000000), np.uint32(0x40000000)
"""Bits in a word of token_counts [B, V]: the token stands in the prompt or was generated; it has a logit bias. The
other bits count how often it was generated."""
NO_TOKEN = 0xFFFFFFFF
NON_FINITE = 0xFFFFFFFE
"""Instead of a token: the logits were such that none could be sampled (`executor.SlotResult`)."""
NO_MASK = 0xFFFFFFFD
"""Instead of a token: the host did not say in time what the row may sample."""
CUT_NODE = 0xFFFFFFFC
"""Instead of a token: a drafted node that is cut was reached."""
NOTHING_ALLOWED = 0xFFFFFFFB
"""Instead of a token, and the least such code: every token that the row's mask allows has the logit -infinity."""
ADMIT, PREFILL, DECODE, RECALL, SPECULATE, CATCH_UP, DECODE_CERTAIN = range(1, 8)

Struct = np.dtype[np.void]
Field = tuple[str, str] | tuple[str, str, tuple[int, ...]] | tuple[str, Struct, tuple[int, ...]]


def struct(alignment: int, *fields: Field) -> Struct:
    """Return the dtype of a C struct whose fields, (name, type) or (name, type, shape), leave gaps only at its end."""
    names, formats = [field[0] for field in fields], [field[1] if len(field) == 2 else field[1:] for field in fields]
    ends = list(accumulate((np.dtype(part).itemsize for part in formats), initial=0))
    size = -(-ends[-1] // alignment) * alignment
    return np.dtype({"names": names, "formats": formats, "offsets": ends[:-1], "itemsize": size})


def of_type(kind: str, *names: str) -> tuple[Field, ...]:
    """Return fields of one type."""
    return tuple((name, kind) for name in names)


SLOT_STATE = struct(
    16,
    ("seed", "<u8"),
    *of_type("<i4", "last_token", "position", "num_generated", "max_new_tokens", "finished", "top_k"),
    *of_type("<f4", "temperature", "top_p", "log_min_p"),
    *of_type("<f4", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *of_type("<i4", "num_logprobs", "num_stop_ids"),
    ("stop_ids", "<i4", (MAX_STOP_IDS,)),
    ("num_logit_biases", "<i4"),
    ("biased_ids", "<i4", (MAX_LOGIT_BIAS,)),
    ("logit_biases", "<f4", (MAX_LOGIT_BIAS,)),
)
COMMAND = struct(16, *of_type("<i4", "kind", "num_rows", "slot", "start", "is_last"), ("reserved", "<i4", (3,)))
TOKEN_LOGPROBS = struct(
    16,
    ("logprob", "<f4"),
    ("num_top", "<i4"),
    ("top_logprobs", "<f4", (MAX_LOGPROBS,)),
    ("top_ids", "<i4", (MAX_LOGPROBS,)),
)
RESULT_RECORD = struct(16, ("words", "<u8", (MAX_ROWS,)), ("logprobs", TOKEN_LOGPROBS, (MAX_ROWS,)))
STEP_CONTEXT = struct(16, ("next_entry", "<u8"), ("sequence", "<u8"), ("num_passed", "<i4"))
