"""Small ops on the rows of a step: embedding, RMSNorm, joining, copying columns, clearing.

Arrays and shapes are those of `ops.protocol.Ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.ops import check_shapes

BLOCK = 256
VECTOR = 8
"""Elements that a thread moves at a time."""
_EMBED_THREADS = 128


@dataclass(frozen=True)
class RowConstants:
    """Compile-time constants of kernels on rows: the elements of a row."""

    hidden: int


@dataclass(frozen=True)
class JoinConstants:
    """Compile-time constants of join.cu: the elements of a row's two halves."""

    a_columns: int
    b_columns: int


EMBED = KernelSpec("embed", "rows/embed.cu", "embed", RowConstants, hot=True)
RMS_NORM = KernelSpec("rms_norm", "rows/norm.cu", "rms_norm", RowConstants, hot=True)
GATE_ROWS = KernelSpec("gate_rows", "rows/gate.cu", "gate_rows", RowConstants, hot=True)
JOIN = KernelSpec("join", "rows/join.cu", "join", JoinConstants, hot=True)
COPY_COLUMNS = KernelSpec("copy_columns", "rows/columns.cu", "copy_columns", hot=True)
CLEAR = KernelSpec("clear", "rows/columns.cu", "clear", hot=True)


def embed(
    launch: Launcher, slots: DeviceArray, out: DeviceArray, token_ids: DeviceArray, table: DeviceArray, scale: float
) -> None:
    """Launch the op `embed`; rows of slot -1 become zeros."""
    check_shapes("embed", out=out, token_ids=token_ids, table=table)
    constants = RowConstants(out.shape[1])
    launch(EMBED, constants, len(out), _EMBED_THREADS, out, token_ids, slots, table, np.float32(scale))


def rms_norm(launch: Launcher, out: DeviceArray, x: DeviceArray, norm: DeviceArray, eps: float) -> None:
    """Launch the op `rms_norm`."""
    check_shapes("rms_norm", out=out, x=x, norm=norm)
    launch(RMS_NORM, RowConstants(x.shape[1]), len(x), BLOCK, out, x, norm, np.float32(eps))


def join(
    launch: Launcher, joined: DeviceArray, a: DeviceArray, a_norm: DeviceArray | None,
    b: DeviceArray, b_norm: DeviceArray | None, eps: float,
) -> None:  # fmt: skip
    """Launch the op `join`: a block for each half of each row."""
    sizes = check_shapes("join", joined=joined, a=a, a_norm=a_norm, b=b, b_norm=b_norm)
    constants = JoinConstants(sizes["A"], sizes["E"])
    launch(JOIN, constants, (len(a), 2), BLOCK, joined, a, a_norm, b, b_norm, np.float32(eps))


def copy_columns(launch: Launcher, out: DeviceArray, x: DeviceArray, first: int) -> None:
    """Launch the op `copy_columns`."""
    check_shapes("copy_columns", out=out, x=x)
    counts = (np.int32(count) for count in (first, out.shape[1], x.shape[1], len(x)))
    launch(COPY_COLUMNS, {}, -(-x.size // VECTOR // BLOCK), BLOCK, out, x, *counts)


def gate_rows(
    launch: Launcher, out: DeviceArray, norm: DeviceArray | None, gate: DeviceArray | None, eps: float
) -> None:
    """Launch the op `gate_rows`."""
    check_shapes("gate_rows", out=out, norm=norm, gate=gate)
    launch(GATE_ROWS, RowConstants(out.shape[1]), len(out), BLOCK, out, norm, gate, np.float32(eps))


def clear(launch: Launcher, out: DeviceArray) -> None:
    """Launch the op `clear`."""
    check_shapes("clear", out=out)
    num_vectors = -(-out.size // VECTOR)
    launch(CLEAR, {}, -(-num_vectors // BLOCK), BLOCK, out, np.int32(num_vectors))
