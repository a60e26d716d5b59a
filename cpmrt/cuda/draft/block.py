"""Launches of a DSpark draft's block: its rows, the candidates of each, and the chain of tokens chosen among them.

A Speculate step of such a draft is

    speculate_begin(n, hidden)                 n rows that the draft has not seen yet, the newest one last
    draft commit of rows 0..n-1
    block_begin()
    draft forward of the block's rows, head of all of them
    markov_chain(shape, logits, states)
    target forward of the tree_size rows, head of them
    sample_tree(logits); accept(shape, hidden)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cpmrt.config import TreeShape
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.build.spec import KernelSpec, macros_of
from cpmrt.cuda.draft.kernels import DRAFT_TOP_K, TARGET_ROWS
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.step.kernels import ROW_THREADS, row_blocks
from cpmrt.cuda.step.memory import lasting_buffer
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.draft import Draft
from cpmrt.models.drafts.dspark import MARKOV_CANDIDATES, MarkovWeights, markov_parts
from cpmrt.tensor_spec import BufferSpec


@dataclass(frozen=True)
class BlockConstants:
    """Compile-time constants of block.cu: rows of the draft's head, equal parts they are cut into, columns of the
    Markov head."""

    vocab: int
    parts: int
    rank: int


BLOCK_BEGIN = KernelSpec(
    "block_begin", "draft/block.cu", constants=BlockConstants, hot=True, reason="drafting: the rows of a block"
)
MARKOV_CHAIN = KernelSpec(
    "markov_chain", "draft/block.cu", constants=BlockConstants, hot=True, reason="drafting: the tokens of a block"
)
_THREADS = 512


def block_tables(draft: Draft, num_trees: int = 1) -> tuple[BufferSpec, ...]:
    """Return the buffers of a step's blocks that live as long as the executor; none for a draft without blocks."""
    if not draft.block_rows:
        return ()
    num_rows = num_trees * draft.block_rows
    num_parts = num_rows * markov_parts(draft.vocab_size)
    return (
        lasting_buffer("draft_reach", np.int32, num_rows),
        lasting_buffer("part_slots", np.int32, num_parts),
        lasting_buffer("part_ids", np.int32, num_parts, MARKOV_CANDIDATES),
        lasting_buffer("part_logprobs", np.float32, num_parts, MARKOV_CANDIDATES),
    )


def block_modules(draft: Draft) -> tuple[Module, ...]:
    """Return the module that `BlockKernels` launches beside that of `draft_top_k`; none for a draft without blocks.

    Raises UnsupportedModelError for a head of another size than the kernels take.
    """
    return ((BLOCK_BEGIN.file, macros_of(_constants(draft))),) if draft.block_rows else ()


def _constants(draft: Draft) -> BlockConstants:
    assert draft.config.block is not None
    rank = draft.config.block.markov_rank
    if rank % 8:
        raise UnsupportedModelError("markov_rank of a DSpark draft on a GPU", expected="a multiple of 8", actual=rank)
    return BlockConstants(draft.vocab_size, markov_parts(draft.vocab_size), rank)


def candidate_vocab(draft: Draft) -> int:
    """Return how many tokens a row of `draft_top_k` looks at: the draft's vocabulary, or a part of it for DSpark."""
    return draft.vocab_size // markov_parts(draft.vocab_size) if draft.block_rows else draft.vocab_size


class BlockKernels:
    """The kernels of `kernels_cu/draft/block.cu` on the arena's arrays (`block_tables` and those of `TreeKernels`)."""

    def __init__(
        self, launcher: Launcher, draft: Draft, arrays: Mapping[str, DeviceArray], markov: MarkovWeights, device: Device
    ):
        assert draft.config.block is not None
        self._constants = _constants(draft)
        self._launch, self._arrays, self._markov = launcher, arrays, markov
        self._num_rows, self._mask_token = draft.block_rows, draft.config.block.mask_token_id
        self._min_confidence = draft.min_confidence
        self._part = candidate_vocab(draft)
        self._top_k = {"VOCAB": self._part, "PORTABLE": int(device.is_portable)}
        self._row_blocks = row_blocks(device)

    def load(self) -> None:
        """Load every kernel without running one."""
        for spec in (BLOCK_BEGIN, MARKOV_CHAIN):
            self._launch.modules.kernel(spec, self._constants)

    def block_begin(self, num_trees: int = 1) -> None:
        """Set up the draft's rows of each sequence: the newest token, and mask tokens after it as far as there is room.
        """
        a = self._arrays
        rows = (a[f"draft_{name}"] for name in ("token_ids", "positions", "slots", "reach"))
        self._launch(
            BLOCK_BEGIN, self._constants, num_trees, _THREADS, a["draft_tree"], *rows, a["part_slots"],
            np.int32(self._num_rows), np.int32(self._mask_token),
        )  # fmt: skip

    def markov_chain(
        self, shape: TreeShape, logits: DeviceArray, states: DeviceArray, token_map: DeviceArray | None = None,
        num_trees: int = 1,
    ) -> None:  # fmt: skip
        """Choose at most tree_size - 1 tokens of each sequence one after another, and set up the first tree_size of
        the num_nodes target's rows for them.

        `logits` float32 [num_trees * rows, V] and `states` [num_trees * rows, hidden]: of the blocks. `token_map` int32
        [V]: the token of each row of the draft's head; None: the same number.
        """
        a, markov, weighs = self._arrays, self._markov, self._min_confidence > 0
        rows = tuple(a[name] for name in TARGET_ROWS)
        num_parts, k = num_trees * self._num_rows * self._constants.parts, min(MARKOV_CANDIDATES, self._part)
        self._launch(
            DRAFT_TOP_K, self._top_k, (self._row_blocks, num_parts), ROW_THREADS, a["part_ids"], a["part_logprobs"],
            logits, a["part_slots"], None, np.int32(k),
        )  # fmt: skip
        self._launch(
            MARKOV_CHAIN, self._constants, num_trees, _THREADS, a["draft_tree"], *rows, logits, states,
            a["part_ids"], a["draft_slots"], markov.first, markov.second,
            token_map, markov.confidence if weighs else None, markov.bias if weighs else None,
            np.float32(self._min_confidence), np.int32(states.shape[1]),
            *map(np.int32, (self._num_rows, shape.tree_size, shape.num_nodes)),
        )  # fmt: skip
