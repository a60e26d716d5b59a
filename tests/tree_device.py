"""Runs `TreeKernels` on a GPU with arrays and rings of their own, and with no model between the launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from speculation_oracle import Row, Running

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.draft.kernels import TreeKernels
from cpmrt.cuda.draft.memory import tree_tables
from cpmrt.cuda.draft.structs import DRAFT_TREE
from cpmrt.cuda.step import structs as ss
from cpmrt.cuda.step.commands import command_bytes, write_slots
from cpmrt.cuda.step.rings import answered_tokens
from cpmrt.dtypes import DType
from cpmrt.memory.caches import CacheLayout, CacheSpec

VOCAB, SLOTS, PAGES, LAYERS, HEADS, HEAD_DIM, NUM_PAGES = 96, 3, 5, 3, 2, 64, 16
MAX_ROWS = 128
_ROW = ("token_ids", "positions", "slots", "locations")
DRAFT_ROW = tuple(f"draft_{name}" for name in (*_ROW, "masks", "base"))
TARGET_ROW = (*_ROW, "tree_masks", "tree_base")


class TreeDevice:
    """The kernels of draft trees with all their buffers, which are poisoned unless the kernels rely on their contents.

    `max_context` 0 means as many positions as a slot's pages have. `moved` names the caches whose rows an accepted
    path moves.
    """

    def __init__(
        self,
        cuda: Any,
        *,
        width: int = 64,
        draft_vocab: int = VOCAB,
        offset: int = 1,
        max_context: int = 0,
        portable: bool = False,
        pdl: bool = False,
        moved: tuple[str, ...] = ("k_pages", "v_pages"),
    ):
        self.cuda, self.width, self.number = cuda, width, 0
        self.max_context = max_context or PAGES * 64
        rng = np.random.default_rng(3)
        specs = tree_tables(SLOTS, self.max_context, MAX_ROWS, width)
        host = {spec.name: np.full(spec.shape, 0x55, spec.dtype or np.uint16) for spec in specs}
        self.tables = rng.permutation(NUM_PAGES)[: SLOTS * PAGES].reshape(SLOTS, PAGES).astype(np.int32)
        pages = rng.integers(0, 2**16, (3, LAYERS, NUM_PAGES, HEADS, 64, HEAD_DIM), np.uint16)
        self.stride = command_bytes(64, PAGES)
        host |= {
            "draft_tree": np.zeros((SLOTS, DRAFT_TREE.itemsize), np.uint8),
            "slot_states": np.zeros(SLOTS * ss.SLOT_STATE.itemsize, np.uint8),
            "token_counts": np.zeros((SLOTS, VOCAB), np.uint32),
            "block_tables": self.tables,
            "step_context": np.zeros(ss.STEP_CONTEXT.itemsize, np.uint8),
            "chunk": np.zeros(4, np.int32),
            "results": np.zeros(ss.RING_ENTRIES * ss.RESULT_RECORD.itemsize, np.uint8),
            "commands": np.zeros(ss.RING_ENTRIES * self.stride, np.uint8),
        }
        host |= dict(zip(moved, pages, strict=False))
        host |= {name: np.full(MAX_ROWS, 0x55, np.int32) for name in ("token_ids", "positions", "slots")}
        self.arrays = {name: cuda.array(values) for name, values in host.items()}
        addresses = tuple(np.uint64(self.arrays[name].data.ptr) for name in ("commands", "results"))
        rings = SimpleNamespace(addresses=addresses, command_bytes=self.stride)
        device = cuda.device
        if portable:
            device = SimpleNamespace(capability=80, is_portable=True)
        launcher = Launcher(cuda.stream, Modules(cuda.arch, DType.BFLOAT16), use_pdl=pdl)
        config: Any = SimpleNamespace(vocab_size=VOCAB)
        layer = tuple(CacheSpec(name, (HEADS, 64, HEAD_DIM)) for name in moved)
        caches = CacheLayout((layer,) * LAYERS, self.max_context, SLOTS)
        self.kernels = TreeKernels(
            launcher, config, self.arrays, caches, rings, device,  # type: ignore[arg-type]
            draft_vocab=draft_vocab, position_offset=offset,
        )  # fmt: skip

    def set(self, name: str, values: Any) -> None:
        """Write `values` to the beginning of the buffer `name`."""
        target = self.arrays[name].reshape(-1)
        values = np.ascontiguousarray(values).astype(target.dtype, copy=False).reshape(-1)
        with self.cuda.stream:
            target[: values.size].set(values)
        self.cuda.sync()

    def get(self, name: str) -> Any:
        return np.ascontiguousarray(self.cuda.numpy(self.arrays[name]))

    def tree(self, index: int = 0) -> Any:
        return self.get("draft_tree").view(DRAFT_TREE)[index, 0]

    def set_tree(self, index: int = 0, **fields: Any) -> None:
        trees = self.get("draft_tree").view(DRAFT_TREE)
        for name, value in fields.items():
            if np.ndim(value):
                trees[index, 0][name][: len(value)] = value
            else:
                trees[name][index, 0] = value
        self.set("draft_tree", trees.view(np.uint8))

    def hold(self, running: Running, **sampling: Any) -> None:
        """Write the sequence's state, history and pending rows to its slot; `sampling` are more fields of the state."""
        slot = running.slot
        states, history = self.get("slot_states").view(ss.SLOT_STATE), self.get("history")
        counts, carry = self.get("carry_counts"), self.get("carry_hidden")
        capacities = self.get("capacities")
        state = states[slot]
        fields = {"last_token": running.tokens[-1], "position": running.position, "finished": running.finished}
        fields |= {"num_generated": running.num_generated, "max_new_tokens": running.max_new_tokens}
        for name, value in (fields | sampling).items():
            state[name] = value
        state["num_stop_ids"] = len(running.stop_token_ids)
        state["stop_ids"][: len(running.stop_token_ids)] = running.stop_token_ids
        history[slot, : running.position] = running.tokens[:-1]  # the newest token is in the state only
        counts[slot], capacities[slot] = len(running.pending), running.capacity
        if len(running.pending):
            carry[slot, : len(running.pending)] = running.pending
        for name, values in (("slot_states", states.view(np.uint8)), ("history", history), ("carry_counts", counts)):
            self.set(name, values)
        self.set("carry_hidden", carry)
        self.set("capacities", capacities)

    def command(self, kind: int, *slots: int) -> None:
        """Write the ring's next command; `number` becomes that of this command."""
        commands, counted = self.get("commands"), int(self.get("step_context").view(ss.STEP_CONTEXT)["next_entry"][0])
        at = counted % ss.RING_ENTRIES * self.stride
        write_slots(commands[at : at + self.stride], kind, slots)
        self.set("commands", commands)
        self.number = counted + 1

    def begin(self, running: Running, num_rows: int = 0, hidden: Any | None = None) -> None:
        self.command(ss.SPECULATE, running.slot)
        self.kernels.speculate_begin(num_rows, hidden)

    def begin_several(self, sequences: list[Running], num_trees: int, num_rows: int = 0, hidden: Any = None) -> None:
        """Begin a step of these sequences, after `hold` of each; further trees, up to `num_trees`, have no sequence."""
        self.command(ss.SPECULATE, *(running.slot for running in sequences))
        self.kernels.speculate_begin(num_rows, hidden, num_trees)

    def rows(self, names: tuple[str, ...], count: int) -> list[Row]:
        """Return the first `count` rows that a kernel wrote to the buffers `names`."""
        return list(zip(*(self.get(name).reshape(-1)[:count].tolist() for name in names), strict=True))

    def words(self, count: int) -> list[int] | None:
        """Return the first `count` tokens in the newest command's result, or None if not all are written."""
        return answered_tokens(memoryview(self.record()["words"]), self.number, count)

    def record(self) -> Any:
        return self.get("results").view(ss.RESULT_RECORD)[(self.number - 1) % ss.RING_ENTRIES]
