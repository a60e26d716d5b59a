"""The launches of each graph of a step, other than those of a draft."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.faults import device_faults
from cpmrt.cuda.driver.graphs import Graphs
from cpmrt.cuda.load.tables import fill
from cpmrt.cuda.step.forward import StepForward
from cpmrt.cuda.step.kernels import StepKernels
from cpmrt.cuda.step.masks import MaskRing
from cpmrt.ops import RowKind


def run_on_padding(launcher: Launcher, graphs: Graphs, slots: DeviceArray, forward: Callable[[], None]) -> None:
    """Compile the kernels of a forward that no step has run yet, and run it once on padding rows to load them. `slots`:
    the array of its rows' slots. Raises MemoryPlanError, DeviceError, KernelCompileError."""
    with launcher.recording() as modules:
        forward()
    launcher.modules.compile(modules)
    graphs.flush()
    with device_faults(), launcher.stream:
        fill(slots, -1)
    forward()


def step_launches(
    steps: StepKernels,
    forward: StepForward,
    buckets: Iterable[int],
    row_counts: Iterable[int],
    after_decode: Callable[[int], None] | None,
) -> dict[Hashable, Callable[[], None]]:
    """Return the launches of each graph by its name: to admit a sequence, recall cached tokens, prefill a chunk of each
    bucket, sample the first token after a prompt, and decode each number of rows of each kind, also with the head
    screened where it can be. `after_decode(rows)` ends a decode step, unless it is None."""

    def first() -> None:
        steps.first_begin()
        forward.head_of_first_row()
        steps.sample(1)

    def prefill(bucket: int) -> None:
        steps.prefill_begin(bucket)
        forward.chunk(bucket)
        steps.prefill_end()

    def decode(num_rows: int, kind: RowKind, is_screened: bool) -> None:
        steps.step_begin(num_rows)
        forward.decode(num_rows, is_screened=is_screened, kind=kind)
        steps.sample(num_rows)
        if after_decode is not None:
            after_decode(num_rows)

    plain: dict[Hashable, Callable[[], None]] = {"admit": steps.admit, "recall": steps.recall, "first": first}
    chunks = {("prefill", bucket): partial(prefill, bucket) for bucket in buckets}
    decodes: dict[Hashable, Callable[[], None]] = {}
    for rows in row_counts:
        for kind in forward.row_kinds(rows):
            for is_screened in forward.screenings(rows):
                decodes["decode", rows, kind, is_screened] = partial(decode, rows, kind, is_screened)
    return plain | chunks | decodes


def masked_launches(
    steps: StepKernels, forward: StepForward, masks: MaskRing, after_decode: Callable[[int], None] | None
) -> tuple[Callable[[int, RowKind], None], Callable[[], None]]:
    """Return two functions that launch steps under masks: one decodes a number of rows of a kind, certain tokens among
    them, and one samples the first token after a prompt."""

    def decode(num_rows: int, kind: RowKind) -> None:
        steps.certain_begin(num_rows)
        forward.decode(num_rows, kind=kind)
        steps.sample_masked(num_rows, masks, is_certain=True)
        if after_decode is not None:
            after_decode(num_rows)

    def first() -> None:
        steps.first_begin()
        forward.head_of_first_row()
        steps.sample_masked(1, masks)

    return decode, first
