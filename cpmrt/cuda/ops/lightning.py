"""Lightning attention: of the rows of a step and of a prompt's chunks; accepted chains of drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cpmrt.config.layers import LIGHTNING_BLOCK
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.ops import LightningHeads, LightningState, Rows, check_shapes

_THREADS, _HEAD_WARPS, _CHUNK_THREADS = 256, 8, 128
_STEP_COLUMNS, _CHUNK_COLUMNS = 32, 64
"""Columns of a state that a block holds."""


@dataclass(frozen=True)
class LightningConstants:
    """Compile-time constants of lightning_prefill.cu: the elements of a head."""

    head_dim: int


@dataclass(frozen=True)
class StepConstants(LightningConstants):
    """Compile-time constants of lightning_decode.cu; `chain`: a step's rows are a chain of drafts in one slot."""

    chain: bool


LIGHTNING_DECODE = KernelSpec(
    "lightning_decode", "mixers/lightning_decode.cu", "lightning_decode", StepConstants, hot=True
)
LIGHTNING_ACCEPT = replace(LIGHTNING_DECODE, name="lightning_accept", op="lightning_accept")
LIGHTNING_HEADS = KernelSpec(
    "lightning_heads", "mixers/lightning_prefill.cu", "lightning_prefill", LightningConstants, hot=True
)
LIGHTNING_PREFILL = replace(LIGHTNING_HEADS, name="lightning_prefill")


class LightningOps:
    """The ops `lightning_decode`, `lightning_prefill` and `lightning_accept` of `ops.protocol.Ops`.

    `chunk`: slot, start and count of a prefill chunk.
    """

    def __init__(self, launcher: Launcher, chunk: DeviceArray):
        self._launch, self._chunk = launcher, chunk

    def decode(
        self, out: DeviceArray, qkv: DeviceArray, heads: LightningHeads, state: LightningState, rows: Rows, eps: float
    ) -> None:
        """Launch the op `lightning_decode`."""
        num_heads, head_dim, num_positions = _checked("lightning_decode", out, qkv, heads, state, rows)
        is_chain = rows.tree_masks is not None
        self._launch(
            LIGHTNING_DECODE, StepConstants(head_dim, is_chain),
            (head_dim // _STEP_COLUMNS, num_heads, 1 if is_chain else len(out)), _THREADS,
            out, state.states, state.chain if is_chain else None, qkv, heads.q_norm, heads.k_norm, heads.rope,
            heads.decay, rows.positions, rows.slots, np.int32(len(out)), np.int32(num_heads), np.int32(num_positions),
            np.float32(eps),
        )  # fmt: skip

    def prefill(
        self, out: DeviceArray, qkv: DeviceArray, heads: LightningHeads, state: LightningState, rows: Rows, eps: float
    ) -> None:
        """Launch the op `lightning_prefill`."""
        num_heads, head_dim, num_positions = _checked("lightning_prefill", out, qkv, heads, state, rows)
        constants = LightningConstants(head_dim)
        if heads.q_norm is not None or heads.rope is not None:
            self._launch(
                LIGHTNING_HEADS, constants, -(-len(out) * 2 * num_heads // _HEAD_WARPS), 32 * _HEAD_WARPS,
                qkv, heads.q_norm, heads.k_norm, heads.rope, rows.positions, rows.slots, np.int32(len(out)),
                np.int32(num_heads), np.int32(num_positions), np.float32(eps),
            )  # fmt: skip
        block = LIGHTNING_BLOCK
        words = 2 * block * (2 * head_dim + _CHUNK_COLUMNS) + 2 * block * block
        self._launch(
            LIGHTNING_PREFILL, constants, (head_dim // _CHUNK_COLUMNS, num_heads), _CHUNK_THREADS,
            out, state.states, qkv, heads.decay, self._chunk, np.int32(num_heads), smem=2 * words + 4 * (block + 1),
        )  # fmt: skip

    def accept(self, state: LightningState, decay: DeviceArray, accepted: DeviceArray) -> None:
        """Launch the op `lightning_accept`. `accepted`: the draft tree, a chain, with its slot and its path."""
        states, chain = state.states, state.chain
        assert chain is not None, "planned without drafts"
        check_shapes("lightning_accept", states=states, chain=chain, decay=decay)
        num_layers, num_slots, num_heads, head_dim, _ = states.shape
        self._launch(
            LIGHTNING_ACCEPT, StepConstants(head_dim, chain=True), (head_dim // _STEP_COLUMNS, num_heads, num_layers),
            _THREADS, states, chain, decay, accepted, *map(np.int32, (num_slots, num_heads, chain.shape[1])),
        )  # fmt: skip


def _checked(
    op: str, out: DeviceArray, qkv: DeviceArray, heads: LightningHeads, state: LightningState, rows: Rows
) -> tuple[int, int, int]:
    """Check the shapes of the op; return the number of heads, the elements of a head, and the table's positions."""
    sizes = check_shapes(
        op, out=out, qkv=qkv, states=state.states, chain=state.chain, q_norm=heads.q_norm, k_norm=heads.k_norm,
        rope=heads.rope, decay=heads.decay, positions=rows.positions, slots=rows.slots,
    )  # fmt: skip
    return sizes["H"], sizes["D"], sizes.get("M", 0)
