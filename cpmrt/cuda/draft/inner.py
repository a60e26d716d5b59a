"""The draft of a small model that drafts, on the device: kernels that join the small model's steps to the target's.

A small model's speculative steps are those of a target, with the kernels and launches of any draft: `memory.as_target`
gives its arrays the names that a target's have. A Speculate step with such a draft is

    speculate_begin(n)                             n rows that the small model has not seen yet
    small model's forward of them, head of row n-1, top_k(logits, 1)
    chain_begin(length); inner draft's forward of the n rows
    while the chain is shorter than `length`:
        a speculative step of the small model, which reports nothing
        chain_goes_on()
    chain_end(shape); lookup_instead(shape) if the shape has a lookup
    target forward of the num_nodes rows, and so on as in `draft.kernels`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from cpmrt.config import TreeShape
from cpmrt.cuda.build.launcher import Launcher, Module
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.draft.forward import DraftForward
from cpmrt.cuda.draft.kernels import TARGET_ROWS
from cpmrt.cuda.draft.launches import DraftLaunches, DraftParts
from cpmrt.cuda.draft.memory import as_target
from cpmrt.cuda.draft.several import waiting_rows
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.load.tables import fill
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.step.rings import Rings
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.draft import PREFIX, Draft
from cpmrt.speculation.procedure import MAX_WAITING, after_chunk

CHAIN_BEGIN = KernelSpec("chain_begin", "draft/chain.cu", reason="drafting: what an inner draft has not seen")
CHAIN_GOES_ON = KernelSpec("chain_goes_on", "draft/chain.cu", reason="drafting: whether a chain needs one more step")
CHAIN_END = KernelSpec("chain_end", "draft/chain.cu", reason="drafting: a small model's chain as nodes to verify")
_THREADS = 256
Loop = Callable[[Callable[[], None], Callable[[np.uint64], None], int], None]
"""The type of `driver.graphs.Graphs.loop`: it launches a body until a kernel ends the loop, at most so many times."""


@dataclass(frozen=True)
class ChainKernels:
    """The kernels of `kernels_cu/draft/chain.cu`; `arrays` are the target's, `inner` those of `as_target`.

    `num_rows`: the rows of the small model's pass after which a chain begins. `position_offset`: that of the inner
    draft, as in `TreeKernels`.
    """

    launch: Launcher
    arrays: Mapping[str, DeviceArray]
    inner: Mapping[str, DeviceArray]
    position_offset: int
    num_rows: int

    def load(self) -> None:
        """Load every kernel without running one."""
        for spec in (CHAIN_BEGIN, CHAIN_GOES_ON, CHAIN_END):
            self.launch.modules.kernel(spec, {})

    def begin(self, num_rows: int, length: int) -> None:
        """Set up the inner draft's rows for those of the small model's last pass, and begin a chain of this length.

        With length 0 no chain begins, and the newest row is left out, because the next pass runs it again.
        """
        a, inner, width = self.arrays, self.inner, self._width
        hidden = inner["hidden"][: num_rows + 1] if width else None
        rows = (inner[f"draft_{name}"] for name in ("token_ids", "positions", "slots"))
        sizes = (num_rows, a["history"].shape[1], self.position_offset, length, width)
        self.launch(
            CHAIN_BEGIN, {}, 1, _THREADS, inner["slot_states"], a["history"], *rows, hidden, *self._carry,
            inner["carry_counts"], a["draft_tree"], *(inner[name] for name in ("token_ids", "positions", "slots")),
            a["draft_ids"] if length else None, *map(np.int32, sizes),
        )  # fmt: skip

    def goes_on(self, handle: np.uint64) -> None:
        """Tell the WHILE node with this handle, which is 0 without one, whether the chain needs one more step."""
        self.launch(CHAIN_GOES_ON, {}, 1, 1, self.inner["slot_states"], self.arrays["draft_tree"], handle)

    def end(self, shape: TreeShape) -> None:
        """Set up the target's rows for the chain. The inner draft then counts as not having seen the chain."""
        a, inner = self.arrays, self.inner
        carry, kept = self._carry
        sizes = (a["history"].shape[1], shape.tree_size, self._width)
        self.launch(
            CHAIN_END, {}, 1, _THREADS, a["draft_tree"], *(a[name] for name in TARGET_ROWS), carry,
            inner["carry_counts"], inner["slot_states"], a["history"], kept, *map(np.int32, sizes),
        )  # fmt: skip

    @property
    def _carry(self) -> tuple[DeviceArray | None, DeviceArray | None]:
        return self.inner.get("carry_hidden"), self.inner.get("carry_kept")

    @property
    def _width(self) -> int:
        """Columns of the small model's states that its draft reads; 0 if it reads none."""
        return int(self.inner["hidden"].shape[1]) if "hidden" in self.inner else 0


class InnerSteps:
    """The launches of the draft of a small model that drafts, between those of the small model.

    `parts` are those of a draft whose target is the small model, and `arrays` has all arrays under the names that such
    a target's have (`as_target`).
    """

    def __init__(
        self, parts: DraftParts, small: DraftForward, kernels: ChainKernels, arrays: Mapping[str, Any], loop: Loop
    ):
        (self._shape,) = parts.draft.shapes
        self.parts, self._kernels, self._small, self._arrays, self._loop = parts, kernels, small, arrays, loop
        self._ops = DraftLaunches(parts, small, arrays)
        self._step = parts.step(self._ops, self._shape)

    @classmethod
    def bind(
        cls,
        draft: Draft,
        small: DraftForward,
        device: Device,
        launcher: Launcher,
        gemm: Gemm,
        arrays: Mapping[str, Any],
        rings: Rings,
        plan: MemoryPlan,
        loop: Loop,
    ) -> InnerSteps:
        """Find the arrays by name, among those of the plan; `small` are the passes of `draft`, the small model."""
        assert draft.inner is not None and plan.draft_caches is not None
        own, caches = as_target(arrays), replace(plan.draft_caches, prefix="")
        inner_caches = plan.inner_caches and replace(plan.inner_caches, prefix=PREFIX)
        parts = DraftParts.bind(
            draft.inner, draft.config.layers_config, device, launcher, gemm, own, rings, caches, inner_caches,
            reports=False,
        )  # fmt: skip
        kernels = ChainKernels(launcher, arrays, own, int(draft.inner.config.reads_states), waiting_rows(draft))
        return cls(parts, small, kernels, own, loop)

    def modules(self) -> tuple[Module, ...]:
        """Return the modules of the kernels that are launched beside the forwards."""
        return (*self.parts.modules(), (CHAIN_BEGIN.file, {}))

    def load(self) -> None:
        """Load these kernels without running one."""
        self.parts.load()
        self._kernels.load()

    def mark_empty(self, mark: Callable[[Mapping[str, Any]], None]) -> None:
        """Mark the arrays with `mark`, as for any draft, on the current stream, and slots as without a chain."""
        mark(self._arrays)
        fill(self._arrays["slot_states"], 1)  # all have finished

    def admitted(self, slot: int) -> None:
        """Note, on the current stream, that the draft has seen nothing of the slot's new sequence."""
        self._arrays["carry_counts"][slot : slot + 1].fill(0)

    def chunk(self, num_rows: int) -> None:
        """Run the draft over the chunk of a prompt that the small model has just run."""
        if self.parts.forward is not None:
            after_chunk(self._ops, num_rows)

    def catch_up(self) -> None:
        """Run the draft over the tokens that the small model has caught up with, except for the newest."""
        self._see(MAX_WAITING, 0)

    def chain(self, shape: TreeShape) -> None:
        """Draft a chain after the rows that the small model has just run, and set up the target's rows for it."""
        length = shape.tree_depth
        self._see(self._kernels.num_rows, length)
        if length > 1:
            self._loop(self._step, self._kernels.goes_on, length - 1)
        self._kernels.end(shape)

    def passes(self, length: int) -> None:
        """Run, for timing, the passes of a chain all of whose tokens the inner draft guesses."""
        if self.parts.forward is not None:
            self.parts.forward.see(self._kernels.num_rows)
        for _ in range(ceil((length - 1) / self._shape.max_emitted)):
            self.parts.passes(self._shape)
            self._small.tree(self._shape.num_nodes)

    def _see(self, num_rows: int, length: int) -> None:
        self._kernels.begin(num_rows, length)
        if self.parts.forward is not None:
            self.parts.forward.see(num_rows)
