"""Reads a checkpoint's files: which bytes belong where in the arena, and the threads that read them.

The rows of a weight are those of its sources one after another, so fused weights (qkv, gate_up) take no more than
reading each source to its place. A file is read in pieces into a small ring of host buffers; nothing else is held.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Protocol

from cpmrt.cores import usable_cores
from cpmrt.dtypes import DType
from cpmrt.errors import CheckpointError, quoted
from cpmrt.memory.plan import Region
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.check import source_entry
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.files import open_file
from cpmrt.weights.mapped_file import TensorEntry
from cpmrt.weights.safetensors import FLOATS

SLOT_BYTES = 4 << 20
NUM_SLOTS = 16
MAX_READERS = 8


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One read: `nbytes` bytes at `offset` of a file, whole elements of `tensor`, stored as `stored`.

    They go to byte `destination` of the arena, converted to its type; with `stored` None they stay as they are.
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


class Ring(Protocol):
    """A ring of host buffers (slots) that readers fill and whose bytes then go to the arena.

    `wait` and `submit` of one slot are only ever called from one thread, those of different slots from several.
    """

    @property
    def slots(self) -> Sequence[memoryview]:
        """The buffers, writable."""

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
    """Plan the reads that fill the regions of `specs` (by name, planned for `dtype`), in file order.

    No read is larger than `max_bytes`. Raises CheckpointError if a source is not in the checkpoint as specified.
    """
    jobs: list[ReadJob] = []
    for spec in specs:
        region = regions[spec.name]
        place = region.offset
        for source in spec.sources:
            entry, elements = source_entry(source, checkpoint), elements_of(source, range(source.shape[0]))
            jobs.extend(reads_of(entry, place, dtype, elements, max_bytes=max_bytes))
            place += prod(source.shape) * dtype.itemsize
        if place != region.offset + region.nbytes:
            raise ValueError(f"the sources of {spec.name} do not fill its region of {region.nbytes} bytes")
    return in_file_order(jobs)


def in_file_order(jobs: Iterable[ReadJob]) -> list[ReadJob]:
    """Return the jobs sorted by file and offset, so that a disk reads forwards."""
    return sorted(jobs, key=lambda job: (job.path, job.offset))


def reads_of(
    entry: TensorEntry,
    destination: int,
    dtype: DType | None,
    runs: Iterable[range] | None = None,
    *,
    max_bytes: int = SLOT_BYTES,
) -> Iterator[ReadJob]:
    """Yield reads of whole elements of a tensor, or of runs of its elements, which become `dtype` one after another.

    With `dtype` None the elements are bytes, which stay as they are.
    """
    stored = None if dtype is None else FLOATS[entry.dtype]
    width, kept = (1, 1) if stored is None or dtype is None else (stored.itemsize, dtype.itemsize)
    size = max_bytes // width
    for run in runs or (range(entry.nbytes // width),):
        for first in range(run.start, run.stop, size):
            count = min(size, run.stop - first)
            yield ReadJob(entry.name, entry.path, entry.offset + first * width, count * width, stored, destination)
            destination += count * kept


def elements_of(source: Source, rows: range) -> Iterator[range]:
    """Yield, in runs, the elements of a tensor that are these rows of a source (of a vector: these elements).

    Where the source is a choice of its tensor's rows, consecutive rows of the tensor are one run.
    """
    columns = prod(source.shape[1:])
    chosen = source.rows and source.rows[rows.start : rows.stop]
    if not chosen:
        yield range(rows.start * columns, rows.stop * columns)
        return
    borders = [at for at in range(1, len(chosen)) if chosen[at] != chosen[at - 1] + 1]
    for first, end in zip((0, *borders), (*borders, len(chosen)), strict=True):
        yield range(chosen[first] * columns, (chosen[end - 1] + 1) * columns)


def read_all(
    jobs: Sequence[ReadJob], ring: Ring, *, num_readers: int | None = None, drop_page_cache: bool = False
) -> None:
    """Read every job into a slot of `ring` and submit it. On return all jobs are submitted.

    `drop_page_cache` tells the operating system that a piece which was read is not needed again: on unified memory its
    pages are memory that the device lacks. Raises CheckpointError if a file cannot be read or is too short; what was
    submitted until then may still be under way.
    """
    num_readers = min(num_readers or min(MAX_READERS, usable_cores()), len(ring.slots))
    queue = deque(jobs)
    with ExitStack() as stack:
        files = {path: stack.enter_context(open_file(path)).fileno() for path in {job.path for job in jobs}}

        def read_jobs(slots: Sequence[int]) -> None:
            for slot in cycle(slots):
                try:
                    job = queue.popleft()
                except IndexError:
                    return
                ring.wait(slot)
                _read(files[job.path], job, ring.slots[slot])
                ring.submit(slot, job)
                if drop_page_cache:
                    os.posix_fadvise(files[job.path], job.offset, job.nbytes, os.POSIX_FADV_DONTNEED)

        with ThreadPoolExecutor(num_readers, thread_name_prefix="cpmrt-read") as pool:
            try:
                shares = [range(first, len(ring.slots), num_readers) for first in range(num_readers)]
                readers = [pool.submit(read_jobs, share) for share in shares]
                wait(readers, return_when=FIRST_EXCEPTION)
            finally:
                # After an error or an interrupt this leaves the readers nothing to do; else the queue is empty already.
                queue.clear()
        for reader in readers:
            reader.result()


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
