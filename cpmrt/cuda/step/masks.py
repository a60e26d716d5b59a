"""The masks of steps in page-locked memory, where the sampling kernel waits for them (`masked_sampling.cu`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from time import perf_counter

import numpy as np

from cpmrt.cuda.driver.graphs import Graphs
from cpmrt.cuda.driver.host_memory import HostBuffer, host_buffers
from cpmrt.cuda.step.structs import RING_ENTRIES
from cpmrt.errors import MaskError
from cpmrt.executor import MAX_ROWS, Mask, TreeMasks
from cpmrt.ops import ANY_ROWS, RowKind

_CUT, _ANY, _MASKED = 0, 1, 2
_FIRST = "first under a mask"
_PATIENCE_S = 10.0
"""The time after which the device ends a sequence whose nodes have no masks yet."""


class MaskRing:
    """Masks of the rows of each command in the ring, for at most `num_rows` rows of `vocab_size` tokens."""

    def __init__(self, num_rows: int, vocab_size: int):
        self.num_rows, self.num_words = num_rows, -(-vocab_size // 32)
        entries = RING_ENTRIES * num_rows
        self._ready, self._bits = host_buffers(entries * 8, entries * self.num_words * 4)
        self._ready_words = self._ready.array(np.uint64).reshape(RING_ENTRIES, num_rows)
        self._bit_bytes = self._bits.array(np.uint8).reshape(RING_ENTRIES, num_rows, self.num_words * 4)
        last = vocab_size % 8
        self._last_byte = (1 << last) - 1 if last else 0xFF
        self._num_bytes = -(-vocab_size // 8)
        self._barrier = Lock()

    @property
    def addresses(self) -> tuple[np.uint64, np.uint64]:
        """The addresses of the words that say which masks are ready, and of the masks' bits, as kernels take them."""
        return np.uint64(self._ready.device_address), np.uint64(self._bits.device_address)

    def write(self, number: int, masks: Sequence[Mask | None]) -> None:
        """Write the masks of command `number`, each now or when it is filled.

        The earlier command with the same place in the ring must be answered.
        """
        self.forget(number)
        for row, mask in enumerate(masks):
            if mask is None or mask.is_filled:
                self._write(number, row, None if mask is None else mask.bits)
            else:
                mask.on_fill = partial(self._write, number, row)

    def forget(self, number: int) -> None:
        """Mark all rows of command `number` as having no mask yet: an earlier command of this number may have failed
        before it was launched, and have left some."""
        self._ready_words[(number - 1) % RING_ENTRIES] = 0

    def write_nodes(self, number: int, num_nodes: int, left: Mapping[int, bytes | None]) -> None:
        """Write the masks of command `number`, which `left` has by node; mark the other nodes as cut."""
        for node in range(num_nodes):
            if node in left:
                self._write(number, node, left[node])
            else:
                self._ready_words[(number - 1) % RING_ENTRIES, node] = number << 2 | _CUT

    def close(self) -> None:
        """Free the memory; the device must be done with it."""
        self._ready.close()
        self._bits.close()

    def _write(self, number: int, row: int, bits: bytes | None) -> None:
        entry = (number - 1) % RING_ENTRIES
        if bits is not None:
            target = self._bit_bytes[entry, row]
            count = min(len(bits), self._num_bytes)
            target[:count] = np.frombuffer(bits, np.uint8, count)
            target[count:] = 0
            target[self._num_bytes - 1] &= self._last_byte
            # Releasing and then acquiring a lock makes the device see the bits before the ready word, on ARM too.
            for _ in range(2):
                with self._barrier:
                    pass
        self._ready_words[entry, row] = number << 2 | (_ANY if bits is None else _MASKED)


class TreeRing:
    """Trees of Speculate commands, as the device reports them, and the masks of their nodes on the way back."""

    def __init__(self, vocab_size: int):
        self._nodes = HostBuffer(RING_ENTRIES * MAX_ROWS * 8)
        try:
            self.masks = MaskRing(MAX_ROWS, vocab_size)
        except BaseException:
            self._nodes.close()
            raise
        self._words = self._nodes.array(np.uint64)

    @property
    def address(self) -> np.uint64:
        """The address of the nodes, as kernels take it."""
        address: np.uint64 = np.uint64(self._nodes.device_address)
        return address

    def nodes(self, number: int, num_nodes: int) -> tuple[list[int], list[int]] | None:
        """Return tokens and parents of the nodes of a command, or None if the device has not reported all yet."""
        first = (number - 1) % RING_ENTRIES * MAX_ROWS
        words, mark = self._words[first : first + num_nodes].tolist(), number & 0xFFFFFF
        if any(word >> 40 != mark for word in words):
            return None
        parents = [word >> 32 & 0xFF for word in words]
        return [word & 0xFFFFFFFF for word in words], [-1 if parent == 0xFF else parent for parent in parents]

    def close(self) -> None:
        """Free the memory; the device must be done with it."""
        self.masks.close()
        self._nodes.close()


class MaskedTree:
    """The tree of one command: whoever waits for the command calls it until its nodes have their masks."""

    def __init__(self, ring: TreeRing, number: int, num_nodes: int, masks: TreeMasks):
        self._ring, self._number, self._num_nodes, self._masks = ring, number, num_nodes, masks
        self._is_written = False
        self._called_at = perf_counter()
        ring.masks.forget(number)
        masks.on_let_go = self._let_go

    def __call__(self) -> bool:
        """Write the masks if the device has reported the tree by now; return whether it has yet to do so.

        Raises MaskError if nobody has called this for so long that the device has given up.
        """
        now, before = perf_counter(), self._called_at
        self._called_at = now
        if self._is_written:
            return False
        if now - before > _PATIENCE_S:
            raise MaskError.late()
        nodes = self._ring.nodes(self._number, self._num_nodes)
        if nodes is None:
            self._masks.prepare()
            return True
        self._write(self._masks.of_nodes(*nodes))
        return False

    def _let_go(self) -> None:
        if not self._is_written:
            self._write({0: None})

    def _write(self, left: Mapping[int, bytes | None]) -> None:
        self._is_written = True
        self._ring.masks.write_nodes(self._number, self._num_nodes, left)


class MaskedGraphs:
    """Starts the graphs of steps with masks. They are captured when first needed, since mostly none are.

    `decode(rows, kind)` and `first()` are the launches to capture (`launches.masked_launches`); `prepare(rows)` loads
    the kernels of the former. `kinds`: the row kinds by number of rows; numbers that it lacks have ANY_ROWS only.
    """

    def __init__(
        self, graphs: Graphs, masks: MaskRing, prepare: Callable[[int], None],
        kinds: Mapping[int, tuple[RowKind, ...]], decode: Callable[[int, RowKind], None], first: Callable[[], None],
    ):  # fmt: skip
        self.masks, self._kinds = masks, kinds
        self._graphs, self._prepare, self._decode, self._first = graphs, prepare, decode, first
        self._captured_rows, self._has_first = set[int](), False

    def run_decode(self, num_rows: int, kind: RowKind) -> None:
        """Start a decode step of `num_rows` rows, padding among them, all of this kind. The first such step captures
        the graphs of all kinds: a later one may be submitted while a step waits for its masks."""
        if num_rows not in self._captured_rows:
            self._prepare(num_rows)
            for each in self._kinds.get(num_rows, (ANY_ROWS,)):
                self._graphs.add(("masked", num_rows, each), partial(self._decode, num_rows, each))
            self._captured_rows.add(num_rows)
        self._graphs.run(("masked", num_rows, kind))

    def prepare_first(self) -> None:
        """Capture the graph of `run_first`. A failure has to come before the command of the prompt's last chunk is
        written: host and device count commands separately."""
        if not self._has_first:
            self._graphs.add(_FIRST, self._first)
            self._has_first = True

    def run_first(self) -> None:
        """Start the sampling of the first token after a prompt, behind the graph of its last chunk."""
        self.prepare_first()
        self._graphs.run(_FIRST)
