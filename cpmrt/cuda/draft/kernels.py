"""Launches of a speculative step's own kernels: draft rows set up, trees grown, nodes sampled, paths accepted.

A Speculate step is

    speculate_begin(n, hidden)                     n rows that the draft has not seen yet, the newest one last
    draft forward of rows 0..n-1, head of row n-1, top_k(logits, k, first_row=n-1)
    for depth in 1 .. num_passes - 1:
        tree_grow(shape, depth, g, hidden)         g: the draft's output rows of the pass before
        draft forward of rows 0..k-1, head of them, top_k(logits, k)
    tree_finish(shape)
    target forward of the tree_size rows, head of them
    sample_tree(logits); accept(shape, hidden)

With prompt lookup it is speculate_begin(0), lookup(shape), and the same from the target's forward on. The command is
counted by `accept`, so every launch before it may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig, TreeShape
from cpmrt.config.speculation import MAX_CANDIDATES, MAX_NODES
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.step.rings import Rings
from cpmrt.cuda.step.structs import CATCH_UP, SPECULATE
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
ACCEPT = _spec("accept", "draft/accept.cu", "bookkeeping: the end of a speculative step", "VOCAB")
TREE_KERNELS = (
    DRAFT_TOP_K, TREE_GROW, TREE_FINISH, LOOKUP, SPECULATE_BEGIN, CATCH_UP_END, PREFILL_ROWS, CARRY_ROWS, SAMPLE_TREE,
    ACCEPT,
)  # fmt: skip
_ROW = ("token_ids", "positions", "slots", "locations")
_COPY_THREADS, _ROW_THREADS, _LOOKUP_THREADS, _CHUNK_THREADS = 256, 512, 1024, 1024
_BEGIN_THREADS, _MOST_BEGIN_BLOCKS = 1024, 4
_MOST_MOVED = 3
"""Caches that `accept` moves rows of, at most; all have the shape of the first."""


def tree_modules(config: ModelConfig, device: Device, draft_vocab: int) -> tuple[Module, ...]:
    """What `TreeKernels` launches; `draft_vocab`: rows of the draft's head, 0 for prompt lookup."""
    portable = int(device.is_portable)
    head = ((DRAFT_TOP_K.file, {"VOCAB": draft_vocab, "PORTABLE": portable}),) if draft_vocab else ()
    sampling = (SAMPLE_TREE.file, {"VOCAB": config.vocab_size, "PORTABLE": portable})
    plain: tuple[Module, ...] = tuple((spec.file, {}) for spec in (TREE_GROW, SPECULATE_BEGIN, CARRY_ROWS))
    return (*head, *plain, (LOOKUP.file, {"PORTABLE": portable}), sampling, (ACCEPT.file, {"VOCAB": config.vocab_size}))


class TreeKernels:
    """The kernels of `kernels_cu/draft` and `sampling/tree_sampling.cu` on the arena's arrays
    (`tree_workspace.tree_tables` and those of `StepKernels`).

    `position_offset`: 1 if the draft's row at a position holds the token of the next one (EAGLE), 0 for an independent
    model. Rows of hidden states, target's and draft's, are arrays of 16-bit words [T, width], width a multiple of 8.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: ModelConfig,
        arrays: Mapping[str, Any],
        caches: CacheLayout,
        rings: Rings,
        device: Device,
        *,
        draft_vocab: int,
        position_offset: int = 1,
    ):
        self._launch, self._arrays, self._caches = launcher, arrays, caches
        commands, self._results = rings.addresses
        self._in = commands, np.int32(rings.command_bytes)
        self._modules = dict(tree_modules(config, device, draft_vocab))
        self._offset = np.int32(position_offset)
        self._max_context = np.int32(arrays["history"].shape[1])
        self._blocks_per_row = 8 if device.capability >= 90 else 1
        self._draft_rows = tuple(arrays[f"draft_{name}"] for name in (*_ROW, "masks", "base"))
        self._target_rows = tuple(arrays[name] for name in (*_ROW, "tree_masks", "tree_base"))

    def load(self) -> None:
        """Load every kernel without running one."""
        for spec in TREE_KERNELS:
            if spec.file in self._modules:
                self._launch.modules.kernel(spec, self._modules[spec.file])

    def speculate_begin(self, num_rows: int, hidden: Any | None = None) -> None:
        """Look at the next command, a Speculate; set up the draft rows 0 .. num_rows-1 of its sequence (0: none).

        They are the positions that the draft has not seen, in order, the newest in the last row; rows at the front
        that are too many are padding (slot -1). Of more than `num_rows` the oldest are left out. `hidden` [num_rows,
        carry width]: becomes the target's hidden states that belong to them; None where the draft reads none.
        """
        self._pending(SPECULATE, num_rows, hidden)

    def catch_up_begin(self, hidden: Any | None = None) -> None:
        """The same with MAX_NODES rows for a CatchUp command: a pass of the draft that drafts nothing."""
        self._pending(CATCH_UP, MAX_NODES, hidden)

    def catch_up_end(self) -> None:
        """Count the CatchUp command and answer it. All but the newest row have been seen then."""
        a = self._arrays
        carry = a.get("carry_hidden")
        self._start(
            CATCH_UP_END, 1, _COPY_THREADS, carry, a["carry_counts"], self._results, a["step_context"],
            *self._in, np.int32(_width(carry)),
        )  # fmt: skip

    def top_k(self, logits: Any, k: int, token_map: Any | None = None, first_row: int = 0) -> None:
        """The best `k` of each row of float32 logits [T, draft_vocab], row t being draft row first_row + t.

        `token_map` int32 [draft_vocab]: the token of each row of the draft's head; None: the same number.
        """
        a, rows = self._arrays, logits.shape[0]
        slots = a["draft_slots"][first_row : first_row + rows]
        self._start(
            DRAFT_TOP_K, (self._blocks_per_row, rows), _ROW_THREADS, a["draft_ids"], a["draft_logprobs"],
            logits, slots, token_map, np.int32(k),
        )  # fmt: skip

    def tree_grow(self, shape: TreeShape, depth: int, outputs: Any | None, hidden: Any | None) -> None:
        """Take the candidates of pass depth - 1 and set up draft rows 0 .. top_k-1 of pass `depth` (from 1 on).

        `hidden` [top_k, width]: becomes, for each row, the row of `outputs` that it follows. `outputs`: what the draft
        gave for the rows of the pass before; for depth 1 the one row of its newest position. Both None where the draft
        reads no hidden state.
        """
        a = self._arrays
        sizes = (depth, shape.top_k)
        self._start(
            TREE_GROW, _copy_blocks(shape.top_k, hidden), _COPY_THREADS, a["draft_tree"], *self._draft_rows,
            hidden, outputs, a["draft_ids"], a["draft_logprobs"], *map(np.int32, sizes), self._offset,
            np.int32(_width(hidden)),
        )  # fmt: skip

    def tree_finish(self, shape: TreeShape) -> None:
        """Take the candidates of the last pass, choose the nodes, and set up the target's rows 0 .. tree_size-1."""
        a = self._arrays
        sizes = (shape.num_passes, shape.top_k, shape.tree_size)
        self._start(
            TREE_FINISH, 1, MAX_CANDIDATES, a["draft_tree"], *self._target_rows, a["draft_ids"],
            a["draft_logprobs"], *map(np.int32, sizes),
        )  # fmt: skip

    def lookup(self, shape: TreeShape) -> None:
        """Draft tree_size - 1 tokens from the sequence's own history and set up the target's rows."""
        a = self._arrays
        self._start(
            LOOKUP, self._blocks_per_row, _LOOKUP_THREADS, a["draft_tree"], *self._target_rows,
            a["history"], self._max_context, np.int32(shape.tree_size),
        )  # fmt: skip

    def sample_tree(self, logits: Any) -> None:
        """A token after every node from float32 logits [tree_size, V]; log-probabilities if the request wants some."""
        a = self._arrays
        self._start(
            SAMPLE_TREE, (self._blocks_per_row, logits.shape[0]), _ROW_THREADS, a["draft_tree"],
            a["tree_logprobs"], a["slot_states"], a["token_counts"], logits, a["slots"],
        )  # fmt: skip

    def accept(self, shape: TreeShape, hidden: Any | None = None, forced: float | None = None) -> None:
        """Accept the longest path: state, history, result, the target's KV pages; count the command.

        `hidden` [tree_size, carry width]: the target's hidden states of the nodes, or None where the draft reads none.
        With `forced` a deepest path counts as accepted, cut to that many tokens in the mean (for timing).
        """
        a = self._arrays
        moved = self._caches.moved(a)
        num_layers, num_pages, num_heads, _, head_dim = moved[0].shape
        columns = (len(moved) * num_layers * num_heads * head_dim + _width(hidden)) // 8
        kept = (*moved, *[None] * (_MOST_MOVED - len(moved)))
        sizes = (shape.tree_size, shape.max_emitted, num_layers, num_pages, num_heads, head_dim)
        self._start(
            ACCEPT, 1 - -columns // _COPY_THREADS, _COPY_THREADS, a["draft_tree"], a["slot_states"],
            a["token_counts"], a["history"], a["carry_counts"], _unless(hidden, a), *kept,
            self._results, a["step_context"], hidden, a["tree_logprobs"], a["block_tables"], *map(np.int32, sizes),
            np.int32(a["block_tables"].shape[1]), np.int32(_width(hidden)), np.float32(forced or 0.0),
        )  # fmt: skip

    def prefill_rows(self, bucket: int, states: Any | None = None) -> None:
        """Set up the draft's rows of a prefill chunk after the target's layers have run over it, `draft_chunk` too.

        `states` [bucket + 1, carry width]: the target's hidden state of the chunk's row i in row i + 1; row 0 becomes
        what the chunk before left. So row i is what the draft's row i reads. The chunk's last row is kept.
        """
        a = self._arrays
        rows = (a["draft_token_ids"], a["draft_positions"], a["draft_slots"], a["draft_chunk"])
        self._start(
            PREFILL_ROWS, 1, _CHUNK_THREADS, *rows, states, _unless(states, a), a["carry_counts"],
            a["token_ids"], a["chunk"], np.int32(bucket), self._offset, np.int32(_width(states)),
        )  # fmt: skip

    def carry_rows(self, num_rows: int, hidden: Any | None = None) -> None:
        """After a Decode step: append each row of `hidden` [num_rows, carry width] to what the draft has not seen.

        A slot that has MAX_NODES already forgets them: let it catch up before.
        """
        a = self._arrays
        carry = (_unless(hidden, a), a["carry_counts"])
        self._start(CARRY_ROWS, num_rows, _COPY_THREADS, *carry, hidden, a["slots"], np.int32(_width(hidden)))

    def _pending(self, kind: int, num_rows: int, hidden: Any | None) -> None:
        a = self._arrays
        sizes = (np.int32(kind), self._max_context, np.int32(num_rows), self._offset, np.int32(_width(hidden)))
        blocks = min(_copy_blocks(num_rows, hidden, _BEGIN_THREADS), _MOST_BEGIN_BLOCKS)
        self._start(
            SPECULATE_BEGIN, blocks, _BEGIN_THREADS, a["draft_tree"],
            *self._draft_rows[:4], hidden, a["history"], _unless(hidden, a), a["carry_counts"], a["capacities"],
            a["slot_states"], a["step_context"], *self._in, *sizes,
        )  # fmt: skip

    def _start(self, spec: KernelSpec, grid: Any, block: int, *args: Any) -> None:
        self._launch(spec, self._modules[spec.file], grid, block, *args)


def _width(rows: Any | None) -> int:
    return 0 if rows is None else int(rows.shape[-1])


def _unless(hidden: Any | None, arrays: Mapping[str, Any]) -> Any | None:
    """The pending rows, if the draft reads hidden states."""
    return None if hidden is None else arrays["carry_hidden"]


def _copy_blocks(num_rows: int, hidden: Any | None, threads: int = _COPY_THREADS) -> int:
    """Blocks that copy rows of `hidden`, 16 bytes a thread; one where there is nothing to copy."""
    return max(1, -(-num_rows * _width(hidden) // 8 // threads))
