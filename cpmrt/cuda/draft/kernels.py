"""Launches of a speculative step's own kernels: draft rows set up, trees grown, nodes sampled, paths accepted.

A Speculate step is

    speculate_begin(n, hidden)                     n rows that the draft has not seen yet, the newest one last
    draft forward of rows 0..n-1, head of row n-1, top_k(logits, k, first_row=n-1)
    for depth in 1 .. num_passes - 1:
        tree_grow(shape, depth, g, hidden)         g: the draft's output rows of the pass before
        draft forward of rows 0..k-1, head of them, top_k(logits, k)
    tree_finish(shape); lookup_instead(shape) if the shape has a lookup
    target forward of the num_nodes rows, head of them
    sample_tree(logits); accept(shape, hidden)

Under a form report_tree(shape) comes before the target's forward, and sample_masked_tree(logits) takes the place of
sample_tree. With prompt lookup it is speculate_begin(0), lookup(shape), and the same from the target's forward on. The
command is counted by `accept`, so every launch before it may be repeated.

A step of several sequences launches the same, with a tree for each. Rows of a pass lie tree by tree, except in the pass
over rows that the draft has not seen: there row r of a tree is row r * num_trees + tree, so that the newest rows of all
trees are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from cpmrt.config import ModelConfig, TreeShape
from cpmrt.config.speculation import LONGEST_MATCH, MAX_CANDIDATES, MAX_NODES
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray, KernelArgument
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.launch import Dimensions
from cpmrt.cuda.step.kernels import ROW_THREADS, row_blocks
from cpmrt.cuda.step.masks import TreeRing
from cpmrt.cuda.step.rings import Rings
from cpmrt.cuda.step.structs import CATCH_UP, SPECULATE
from cpmrt.errors import UnsupportedModelError
from cpmrt.memory.caches import CacheLayout


def _spec(name: str, file: str, reason: str, *constants: str, hot: bool = True) -> KernelSpec:
    return KernelSpec(name, file, constants=constants, hot=hot, reason=reason)


DRAFT_TOP_K = _spec("draft_top_k", "draft/draft_top_k.cu", "drafting: candidates", "VOCAB", "PORTABLE")
TREE_GROW = _spec("tree_grow", "draft/draft_tree.cu", "drafting: the rows of the next pass")
TREE_FINISH = _spec("tree_finish", "draft/draft_tree.cu", "drafting: the nodes to verify")
LOOKUP = _spec("lookup", "draft/lookup.cu", "drafting: from the sequence's own tokens", "PORTABLE")
SPECULATE_BEGIN = _spec("speculate_begin", "draft/speculate.cu", "bookkeeping: rows that the draft has not seen")
CATCH_UP_END = _spec("catch_up_end", "draft/speculate.cu", "bookkeeping: the draft has seen a sequence", hot=False)
PREFILL_ROWS = _spec("prefill_rows", "draft/carry.cu", "bookkeeping: the draft's rows of a prefill chunk")
CARRY_ROWS = _spec("carry_rows", "draft/carry.cu", "bookkeeping: hidden states for the draft's next pass")
SAMPLE_TREE = _spec("sample_tree", "sampling/tree_sampling.cu", "the sampling chain", "VOCAB", "PORTABLE")
REPORT_TREE = _spec(
    "report_tree", "sampling/masked_tree_sampling.cu", "bookkeeping: the nodes that want masks", "VOCAB", "PORTABLE"
)
SAMPLE_MASKED_TREE = _spec(
    "sample_masked_tree", "sampling/masked_tree_sampling.cu", "the sampling chain under masks that the host writes",
    "VOCAB", "PORTABLE",
)  # fmt: skip
ACCEPT = _spec("accept", "draft/accept.cu", "bookkeeping: the end of a speculative step", "VOCAB")
TREE_KERNELS = (
    DRAFT_TOP_K, TREE_GROW, TREE_FINISH, LOOKUP, SPECULATE_BEGIN, CATCH_UP_END, PREFILL_ROWS, CARRY_ROWS, SAMPLE_TREE,
    REPORT_TREE, SAMPLE_MASKED_TREE, ACCEPT,
)  # fmt: skip
_ROW = ("token_ids", "positions", "slots", "locations")
TARGET_ROWS = (*_ROW, "tree_masks", "tree_base")
"""The names of the arrays of a tree's rows in the target, in the order in which kernels take them."""
_COPY_THREADS, _LOOKUP_THREADS, _CHUNK_THREADS = 256, 1024, 1024
_BEGIN_THREADS, _MOST_BEGIN_BLOCKS = 1024, 4
_MOST_MOVED = 3
"""The most caches whose rows `accept` moves."""


def tree_modules(config: ModelConfig, device: Device, draft_vocab: int) -> tuple[Module, ...]:
    """Return the modules that `TreeKernels` launches.

    `draft_vocab`: the rows of the draft's head, or of a part of it; 0 for prompt lookup.
    """
    portable = int(device.is_portable)
    head = ((DRAFT_TOP_K.file, {"VOCAB": draft_vocab, "PORTABLE": portable}),) if draft_vocab else ()
    constants = {"VOCAB": config.vocab_size, "PORTABLE": portable}
    sampling: tuple[Module, ...] = tuple((spec.file, constants) for spec in (SAMPLE_TREE, SAMPLE_MASKED_TREE))
    plain: tuple[Module, ...] = tuple((spec.file, {}) for spec in (TREE_GROW, SPECULATE_BEGIN, CARRY_ROWS))
    lookup, accept = (LOOKUP.file, {"PORTABLE": portable}), (ACCEPT.file, {"VOCAB": config.vocab_size})
    return (*head, *plain, lookup, *sampling, accept)


@dataclass(frozen=True)
class DraftState:
    """The buffers that the kernels of a speculative step read and write, named as in the memory plan."""

    block_tables: DeviceArray
    capacities: DeviceArray
    carry_counts: DeviceArray
    chunk: DeviceArray
    draft_chunk: DeviceArray
    draft_ids: DeviceArray
    draft_logprobs: DeviceArray
    draft_positions: DeviceArray
    draft_slots: DeviceArray
    draft_token_ids: DeviceArray
    draft_tree: DeviceArray
    history: DeviceArray
    slot_states: DeviceArray
    slots: DeviceArray
    step_context: DeviceArray
    token_ids: DeviceArray
    tree_logprobs: DeviceArray
    token_counts: DeviceArray | None = None
    """None for a small model that drafts: its tokens are not counted."""
    carry_hidden: DeviceArray | None = None
    """The target's states of the tokens that wait; None where the draft reads none."""

    @classmethod
    def of(cls, arrays: Mapping[str, DeviceArray]) -> DraftState:
        """Find the buffers among all regions of the plan."""
        return cls(**{field.name: arrays[field.name] for field in fields(cls) if field.name in arrays})

    def carry_for(self, hidden: DeviceArray | None) -> DeviceArray | None:
        """Return `carry_hidden` if the launch also takes rows `hidden` of states, else None."""
        return None if hidden is None else self.carry_hidden


class TreeKernels:
    """The kernels of `kernels_cu/draft` and `sampling/tree_sampling.cu` on the arena's arrays
    (`draft.memory.tree_tables` and those of `StepKernels`).

    `position_offset`: 1 if the draft's row at a position holds the token of the next one (EAGLE), 0 for an independent
    model. Without `reports` the host is told of no step, and no command is counted. Rows of hidden states, target's and
    draft's, are arrays of 16-bit words [T, width], width a multiple of 8.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: ModelConfig,
        arrays: Mapping[str, DeviceArray],
        caches: CacheLayout,
        rings: Rings,
        device: Device,
        *,
        draft_vocab: int,
        position_offset: int = 1,
        reports: bool = True,
    ):
        self._launch, self._state, self._moved = launcher, DraftState.of(arrays), _checked_moved(caches.moved(arrays))
        commands, results = rings.addresses
        self._results = results if reports else None
        self._in = commands, np.int32(rings.command_bytes)
        self._modules = dict(tree_modules(config, device, draft_vocab))
        self._offset = np.int32(position_offset)
        self._max_context = np.int32(self._state.history.shape[1])
        self._row_blocks = row_blocks(device)
        self._draft_rows = tuple(arrays[f"draft_{name}"] for name in (*_ROW, "masks", "base"))
        self._target_rows = tuple(arrays[name] for name in TARGET_ROWS)

    def modules(self) -> tuple[Module, ...]:
        """Return the modules of all kernels launched here."""
        return tuple(self._modules.items())

    def load(self) -> None:
        """Load every kernel without running one."""
        for spec in TREE_KERNELS:
            if spec.file in self._modules:
                self._launch.modules.kernel(spec, self._modules[spec.file])

    def speculate_begin(self, num_rows: int, hidden: DeviceArray | None = None, num_trees: int = 1) -> None:
        """Look at the next command, a Speculate; set up `num_rows` draft rows of each of its sequences (0: none).

        The rows are the positions that the draft has not seen, in order, the newest in the last row. With fewer
        positions the first rows are padding (slot -1), with more the oldest positions are left out. `hidden`
        [num_rows * num_trees, carry width] gets the target's hidden states of the rows; None where the draft reads
        none. A tree without a sequence has only padding.
        """
        self._pending(SPECULATE, num_rows, hidden, num_trees)

    def catch_up_begin(self, num_rows: int, hidden: DeviceArray | None = None) -> None:
        """Look at the next command, a CatchUp, and set up draft rows as `speculate_begin` does."""
        self._pending(CATCH_UP, num_rows, hidden, 1)

    def catch_up_end(self) -> None:
        """Count the CatchUp command and answer it. The draft then counts as having seen all rows but the newest."""
        s = self._state
        self._start(
            CATCH_UP_END, 1, _COPY_THREADS, s.carry_hidden, s.carry_counts, self._results, s.step_context,
            *self._in, np.int32(_width(s.carry_hidden)),
        )  # fmt: skip

    def top_k(self, logits: DeviceArray, k: int, token_map: DeviceArray | None = None, first_row: int = 0) -> None:
        """Take the best `k` tokens of each row of float32 logits [T, draft_vocab], row t being draft row first_row + t.

        `token_map` int32 [draft_vocab]: the token of each row of the draft's head; None: the same number.
        """
        s, rows = self._state, logits.shape[0]
        slots = s.draft_slots[first_row : first_row + rows]
        self._start(
            DRAFT_TOP_K, (self._row_blocks, rows), ROW_THREADS, s.draft_ids, s.draft_logprobs,
            logits, slots, token_map, np.int32(k),
        )  # fmt: skip

    def tree_grow(
        self, shape: TreeShape, depth: int, outputs: DeviceArray | None, hidden: DeviceArray | None, num_trees: int = 1
    ) -> None:
        """Take the candidates of pass depth - 1 and set up `top_k` draft rows of each tree for pass `depth` (from 1
        on).

        `outputs`: the draft's outputs for the rows of the pass before; for depth 1 the one row of each newest position.
        `hidden` [num_trees * top_k, width] gets, for each new row, the row of `outputs` that it follows. Both are None
        where the draft reads no hidden state.
        """
        s = self._state
        sizes, blocks = (depth, shape.top_k), _of_trees(_copy_blocks(shape.top_k, hidden), num_trees)
        self._start(
            TREE_GROW, blocks, _COPY_THREADS, s.draft_tree, *self._draft_rows, hidden, outputs, s.draft_ids,
            s.draft_logprobs, *map(np.int32, sizes), self._offset, np.int32(_width(hidden)),
        )  # fmt: skip

    def tree_finish(self, shape: TreeShape, num_trees: int = 1) -> None:
        """Take the candidates of the last pass, choose the nodes, and set up the first tree_size of the num_nodes
        target's rows of each tree."""
        s = self._state
        sizes = (shape.num_passes, shape.top_k, shape.tree_size, shape.num_nodes)
        self._start(
            TREE_FINISH, num_trees, MAX_CANDIDATES, s.draft_tree, *self._target_rows, s.draft_ids,
            s.draft_logprobs, *map(np.int32, sizes),
        )  # fmt: skip

    def lookup(self, shape: TreeShape, num_trees: int = 1) -> None:
        """Draft tree_size - 1 tokens from each sequence's own history and set up the target's rows."""
        self._lookup(num_trees, shape.tree_size, shape.tree_size - 1, num_kept=0, shortest_match=1)

    def lookup_instead(self, shape: TreeShape, num_trees: int = 1) -> None:
        """Set up the target's num_nodes rows of each tree, which `tree_finish` has set up in part: a chain of
        lookup_length tokens out of the history if the last tokens came before, else padding rows after those of the
        tree."""
        kept, shortest = shape.tree_size, LONGEST_MATCH
        self._lookup(num_trees, shape.num_nodes, shape.lookup_length, num_kept=kept, shortest_match=shortest)

    def _lookup(
        self, num_trees: int, num_nodes: int, num_drafted: int, *, num_kept: int, shortest_match: int
    ) -> None:
        s = self._state
        sizes = (num_nodes, num_drafted, num_kept, shortest_match)
        self._start(
            LOOKUP, _of_trees(self._row_blocks, num_trees), _LOOKUP_THREADS, s.draft_tree, *self._target_rows,
            s.history, self._max_context, *map(np.int32, sizes),
        )  # fmt: skip

    def sample_tree(self, logits: DeviceArray, num_trees: int = 1) -> None:
        """Sample a token after every node from float32 logits [num_trees * num_nodes, V], with log-probabilities if the
        request wants some."""
        s, num_rows = self._state, logits.shape[0]
        self._start(
            SAMPLE_TREE, (self._row_blocks, num_rows), ROW_THREADS, s.draft_tree,
            s.tree_logprobs, s.slot_states, s.token_counts, logits, s.slots, np.int32(num_rows // num_trees),
        )  # fmt: skip

    def report_tree(self, shape: TreeShape, ring: TreeRing) -> None:
        """Tell the host the nodes of the tree."""
        s = self._state
        self._start(
            REPORT_TREE, 1, MAX_NODES, ring.address, s.draft_tree, s.step_context, np.int32(shape.num_nodes)
        )

    def sample_masked_tree(self, logits: DeviceArray, ring: TreeRing) -> None:
        """Sample as `sample_tree` does, each node under its mask, which the kernel waits for the host to write."""
        s, masks = self._state, ring.masks
        self._start(
            SAMPLE_MASKED_TREE, (self._row_blocks, logits.shape[0]), ROW_THREADS, s.draft_tree,
            s.tree_logprobs, s.slot_states, s.token_counts, logits, s.slots, s.step_context, *masks.addresses,
            np.int32(masks.num_rows), np.int32(masks.num_words),
        )  # fmt: skip

    def accept(
        self, shape: TreeShape, hidden: DeviceArray | None = None, forced: float | None = None, num_trees: int = 1
    ) -> None:
        """Accept the longest path of each tree: state, history, result, the target's KV pages; count the command.

        `hidden` [num_trees * num_nodes, carry width]: the target's hidden states of the nodes, or None where the draft
        reads none. With `forced` a deepest path counts as accepted, cut to that many tokens on average (for timing).
        """
        s = self._state
        moved = self._moved
        num_layers, num_pages, num_heads, _, head_dim = moved[0].shape if moved else (0,) * 5
        columns = (len(moved) * num_layers * num_heads * head_dim + _width(hidden)) // 8
        kept = (*moved, *[None] * (_MOST_MOVED - len(moved)))
        sizes = (shape.num_nodes, shape.max_emitted, num_layers, num_pages, num_heads, head_dim)
        self._start(
            ACCEPT, _of_trees(1 - -columns // _COPY_THREADS, num_trees), _COPY_THREADS, s.draft_tree, s.slot_states,
            s.token_counts, s.history, s.carry_counts, s.carry_for(hidden), *kept,
            self._results, s.step_context, hidden, s.tree_logprobs, s.block_tables, *map(np.int32, sizes),
            np.int32(s.block_tables.shape[1]), np.int32(_width(hidden)), np.float32(forced or 0.0),
        )  # fmt: skip

    def prefill_rows(self, bucket: int, states: DeviceArray | None = None) -> None:
        """Set up the draft's rows of a prefill chunk after the target's layers have run over it, `draft_chunk` too.

        `states` [bucket + 1, carry width] has the target's hidden state of the chunk's row i in row i + 1; row 0 gets
        the state that the chunk before has left. So the draft's row i reads row i. The chunk's last state is kept.
        """
        s = self._state
        rows = (s.draft_token_ids, s.draft_positions, s.draft_slots, s.draft_chunk)
        self._start(
            PREFILL_ROWS, 1, _CHUNK_THREADS, *rows, states, s.carry_for(states), s.carry_counts,
            s.token_ids, s.chunk, np.int32(bucket), self._offset, np.int32(_width(states)),
        )  # fmt: skip

    def carry_rows(self, num_rows: int, hidden: DeviceArray | None = None) -> None:
        """After a Decode step, append each row of `hidden` [num_rows, carry width] to the states the draft has to see.

        A slot that has MAX_NODES such rows already loses them, so its draft has to catch up before.
        """
        s = self._state
        carry = (s.carry_for(hidden), s.carry_counts)
        self._start(CARRY_ROWS, num_rows, _COPY_THREADS, *carry, hidden, s.slots, np.int32(_width(hidden)))

    def _pending(self, kind: int, num_rows: int, hidden: DeviceArray | None, num_trees: int) -> None:
        s = self._state
        counts = map(np.int32, (kind, num_trees))
        sizes = (*counts, self._max_context, np.int32(num_rows), self._offset, np.int32(_width(hidden)))
        blocks = min(_copy_blocks(num_rows * num_trees, hidden, _BEGIN_THREADS), _MOST_BEGIN_BLOCKS)
        self._start(
            SPECULATE_BEGIN, blocks, _BEGIN_THREADS, s.draft_tree,
            *self._draft_rows[:4], hidden, s.history, s.carry_for(hidden), s.carry_counts, s.capacities,
            s.slot_states, s.step_context, *self._in, *sizes,
        )  # fmt: skip

    def _start(self, spec: KernelSpec, grid: Dimensions, block: int, *args: KernelArgument) -> None:
        self._launch(spec, self._modules[spec.file], grid, block, *args)


def _checked_moved(moved: list[DeviceArray]) -> list[DeviceArray]:
    """Return the caches whose rows move. Raises UnsupportedModelError for those that `accept` does not take."""
    shapes = {cache.shape for cache in moved}
    if len(moved) > _MOST_MOVED or len(shapes) > 1:
        raise UnsupportedModelError(
            "a draft cannot be used with these caches", expected=f"at most {_MOST_MOVED} of one shape whose rows move",
            actual=f"{len(moved)} of {len(shapes)} shapes", fix="run this model without a draft",
        )  # fmt: skip
    return moved


def _of_trees(blocks: int, num_trees: int) -> int | tuple[int, int]:
    """Return the grid of a kernel with `blocks` blocks for each tree."""
    return blocks if num_trees == 1 else (blocks, num_trees)


def _width(rows: DeviceArray | None) -> int:
    return 0 if rows is None else int(rows.shape[-1])


def _copy_blocks(num_rows: int, hidden: DeviceArray | None, threads: int = _COPY_THREADS) -> int:
    """Return how many blocks copy rows of `hidden`, 16 bytes a thread; one where there is nothing to copy."""
    return max(1, -(-num_rows * _width(hidden) // 8 // threads))
