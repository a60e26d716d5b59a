"""Operands of lightning attention for its kernels, and what they must give: the recurrence in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from reference.brute_force import rms_norm, rotate

from cpmrt.config.layers import LIGHTNING_BLOCK, LightningAttention
from cpmrt.cuda.draft.structs import DRAFT_TREE
from cpmrt.dtypes import DType, round_to

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD = 256
STATE_TOLERANCE = {DType.BFLOAT16: 8e-3, DType.FLOAT16: 1e-3}
"""Tolerance of the state, which takes up rounded keys."""


class Expected(NamedTuple):
    """The outputs of all rows, and the state after them."""

    out: Any
    state: Any


class LightningCase:
    """Projections of `count` consecutive tokens from position 0 on, in slot 1 of three; tests may change its fields."""

    context, eps, slot = 512, 1e-5, 1

    def __init__(self, dtype: DType, heads: int, head_dim: int, count: int, *, is_plain: bool = False):
        rng = np.random.default_rng(heads * head_dim + count)
        self.dtype, self.num_heads, self.head_dim, self.is_plain = dtype, heads, head_dim, is_plain
        mixer = LightningAttention(heads, head_dim)
        self.width, self.slopes = mixer.width, mixer.slopes
        self.qkv = round_to(rng.standard_normal((count, 3 * self.width), np.float32), dtype)
        self.q_norm, self.k_norm = (round_to(1 + rng.standard_normal(head_dim, np.float32) / 4, dtype) for _ in "qk")
        angles = np.outer(np.arange(self.context), 1e4 ** -(np.arange(head_dim // 2) / (head_dim // 2)))
        self.rope = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
        self.decay = np.exp(-np.outer(self.slopes, np.arange(LIGHTNING_BLOCK + 1))).astype(np.float32)
        self.states = rng.standard_normal((3, heads, head_dim, head_dim), np.float32) * np.float32(3)
        self.positions, self.slots = np.arange(count, dtype=np.int32), np.full(count, self.slot, np.int32)

    def heads(self, cuda: Any) -> tuple[Any, ...]:
        """Return q_norm, k_norm, rope and decay on the device; all but decay are None in a plain case."""
        decay = cuda.array(self.decay)
        if self.is_plain:
            return None, None, None, decay
        return (*(cuda.array(norm, self.dtype) for norm in (self.q_norm, self.k_norm)), cuda.array(self.rope), decay)

    def tree(self, cuda: Any, path_length: int, slot: int | None = None) -> Any:
        """Return the record, on the device, that a speculative step leaves of a chain of `path_length` nodes."""
        tree = np.zeros(1, DRAFT_TREE)
        tree["slot"], tree["path_length"] = self.slot if slot is None else slot, path_length
        return cuda.array(tree.view(np.uint8))

    def expected(self, state: Any = None, count: int | None = None) -> Expected:
        """Return what the first `count` tokens must give, one after another, from `state` (None: the slot's) on."""
        state = np.array(self.states[self.slot] if state is None else state, np.float64)
        parts, out = self.qkv[:count].reshape(-1, 3, self.num_heads, self.head_dim).astype(np.float64), []
        for position, (q, k, v) in enumerate(parts):
            if not self.is_plain:
                cos, sin = self.rope[:, position]
                q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
                q, k = (np.stack([rotate(head, cos, sin) for head in heads]) for heads in (q, k))
            state = np.exp(-np.array(self.slopes))[:, None, None] * state + k[:, :, None] * v[:, None]
            out.append((self.head_dim**-0.5 * np.einsum("hk,hkv->hv", q, state)).reshape(-1))
        return Expected(np.stack(out), state)

    def distance(self, found: Any, expected: Any) -> float:
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))

    def check_states(self, found: Any, expected: Any, before: Any = None) -> None:
        """Check that the slot's state is near the expected one and that those of other slots are as before."""
        assert self.distance(found[self.slot], expected) < STATE_TOLERANCE[self.dtype]
        others = [slot for slot in range(len(found)) if slot != self.slot]
        np.testing.assert_array_equal(found[others], (self.states if before is None else before)[others])
