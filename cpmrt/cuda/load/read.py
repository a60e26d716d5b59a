"""Streaming a checkpoint into the arena: which bytes go where, and the threads that read them.

The rows of a packed weight are those of its sources one after another, so the fused ones (qkv, gate_up) come about by
destination offsets alone. A file is read in pieces into a small ring of host buffers; nothing else is held.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Protocol

from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.dtypes import DType
from cpmrt.errors import CheckpointError, quoted
from cpmrt.memory.plan import Region
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.check import source_entry
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.files import open_file
from cpmrt.weights.safetensors import FLOATS, TensorEntry

CONVERT_FLOAT32, CONVERT_16BIT = (
    KernelSpec(name, "load/convert.cu", reason="loading: weights stored as another type")
    for name in ("convert_float32", "convert_16bit")
)
SLOT_BYTES = 4 << 20
NUM_SLOTS = 16
MAX_READERS = 8


@dataclass(frozen=True, slots=True)
class ReadJob:
    """`nbytes` bytes at `offset` of a file: whole elements of `tensor`, stored as `stored`.

    They belong, in the arena's type, at byte `destination` of the arena; with `stored` None as they are.
    """

    tensor: str
    path: Path
    offset: int
    nbytes: int
    stored: DType | None
    destination: int

    @property
    def num_elements(self) -> int:
        return self.nbytes // (1 if self.stored is None else self.stored.itemsize)


class Target(Protocol):
    """Where read bytes go. `wait` and `submit` are called from several threads, for one slot only ever from one."""

    @property
    def slots(self) -> Sequence[memoryview]:
        """Writable host buffers."""

    def wait(self, slot: int) -> None:
        """Return once the buffer of `slot` may be written again."""

    def submit(self, slot: int, job: ReadJob) -> None:
        """Take the bytes of `job` from the beginning of the slot's buffer; need not be done on return."""


def plan_reads(
    specs: Sequence[TensorSpec],
    checkpoint: Checkpoint,
    regions: Mapping[str, Region],
    dtype: DType,
    *,
    max_bytes: int = SLOT_BYTES,
) -> list[ReadJob]:
    """The reads that fill the regions of `specs` (by name, planned for `dtype`), in file order.

    No read is larger than `max_bytes`. Raises CheckpointError if a source is not in the checkpoint as specified.
    """
    jobs: list[ReadJob] = []
    for spec in specs:
        destination = regions[spec.name].offset
        for source in spec.sources:
            entry = source_entry(source, checkpoint)
            rows, stored = range(source.shape[0]), FLOATS[entry.dtype]
            jobs.extend(row_reads(source, entry, stored, destination, dtype, rows, max_bytes=max_bytes))
            destination += prod(source.shape) * dtype.itemsize
        if destination != regions[spec.name].offset + regions[spec.name].nbytes:
            raise ValueError(f"the sources of {spec.name} do not fill its region of {regions[spec.name].nbytes} bytes")
    return sorted(jobs, key=lambda job: (job.path, job.offset))


def load(
    jobs: Sequence[ReadJob], target: Target, *, num_readers: int | None = None, drop_page_cache: bool = False
) -> None:
    """Read every job into a slot of `target` and submit it. On return all jobs are submitted.

    `drop_page_cache` tells the kernel that a piece which was read is not needed again: on unified memory its pages
    are memory that the device lacks. Raises CheckpointError if a file cannot be read or is too short; what was
    submitted until then may still be under way.
    """
    if num_readers is None:
        num_readers = min(MAX_READERS, os.cpu_count() or 1)
    num_readers = min(num_readers, len(target.slots))
    queue = deque(jobs)
    with ExitStack() as stack:
        files = {path: stack.enter_context(open_file(path)).fileno() for path in {job.path for job in jobs}}

        def read_jobs(slots: Sequence[int]) -> None:
            for slot in cycle(slots):
                try:
                    job = queue.popleft()
                except IndexError:
                    return
                target.wait(slot)
                _read(files[job.path], job, target.slots[slot])
                target.submit(slot, job)
                if drop_page_cache:
                    os.posix_fadvise(files[job.path], job.offset, job.nbytes, os.POSIX_FADV_DONTNEED)

        with ThreadPoolExecutor(num_readers, thread_name_prefix="cpmrt-read") as pool:
            try:
                shares = [range(first, len(target.slots), num_readers) for first in range(num_readers)]
                readers = [pool.submit(read_jobs, share) for share in shares]
                wait(readers, return_when=FIRST_EXCEPTION)
            finally:
                # After an error or an interrupt the readers find nothing more to do; else it is empty already.
                queue.clear()
        for reader in readers:
            reader.result()


def row_reads(
    source: Source,
    entry: TensorEntry,
    stored: DType,
    destination: int,
    dtype: DType,
    rows: range,
    *,
    max_bytes: int = SLOT_BYTES,
) -> Iterator[ReadJob]:
    """The reads that bring rows of a source (elements of a vector) to one place; `stored` and `dtype` as in `reads_of`.

    Where the source is chosen rows of its tensor, those that follow one another there are read together.
    """
    columns = prod(source.shape[1:])
    for first, end in _runs(rows if source.rows is None else source.rows[rows.start : rows.stop]):
        elements = range(first * columns, end * columns)
        yield from reads_of(entry, stored, destination, dtype, elements, max_bytes=max_bytes)
        destination += len(elements) * dtype.itemsize


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Beginning and end of each run of consecutive numbers."""
    if isinstance(rows, range):
        yield rows.start, rows.stop
        return
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[first], rows[at - 1] + 1
            first = at


def reads_of(
    entry: TensorEntry,
    stored: DType | None,
    destination: int,
    dtype: DType,
    elements: range | None = None,
    *,
    max_bytes: int = SLOT_BYTES,
) -> Iterator[ReadJob]:
    """Cut a tensor, or a run of its elements, into reads of whole elements that become `dtype`.

    With `stored` None they are bytes, taken as they are.
    """
    width, kept = (1, 1) if stored is None else (stored.itemsize, dtype.itemsize)
    first, end = (0, entry.nbytes) if elements is None else (elements.start * width, elements.stop * width)
    size = max_bytes // width * width
    for begin in range(first, end, size):
        yield ReadJob(
            tensor=entry.name,
            path=entry.path,
            offset=entry.offset + begin,
            nbytes=min(size, end - begin),
            stored=stored,
            destination=destination + (begin - first) // width * kept,
        )


def _read(descriptor: int, job: ReadJob, buffer: memoryview) -> None:
    """Fill the beginning of `buffer` with the bytes of `job`, however many calls the kernel takes for it."""
    done = 0
    while done < job.nbytes:
        try:
            count = os.preadv(descriptor, [buffer[done : job.nbytes]], job.offset + done)
        except OSError as error:
            raise CheckpointError(f"{job.path}: tensor {quoted(job.tensor)} cannot be read: {error}") from error
        if count == 0:
            raise CheckpointError(
                f"{job.path} became shorter while it was read: tensor {quoted(job.tensor)}",
                expected=f"at least {job.offset + job.nbytes} bytes",
                actual=f"{job.offset + done} bytes",
                fix="download the file again, and leave it alone while it loads",
            )
        done += count
