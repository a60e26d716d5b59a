"""How the tensors of quantised sources pass through the staging area of the arena: in waves, each as large as it is.

A wave is read and copied as a whole; then the device repacks it, while the next wave is read. Pure sizes, no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cpmrt.memory.plan import ALIGNMENT
from cpmrt.tensor_spec import Source, TensorSpec

LARGEST_STAGING_BYTES = 128 << 20
"""Of several sources together; a larger one has what it needs."""
_ROUNDED_BYTES = 16 << 20
"""Of a source in 16 bits, at a time."""
_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `begin` to `end` of a source, which are rows from `first_row` on of the weight `spec`.

    At these bytes of the staging area are the codes, scales (of 2 bytes) and zero points in the form of the source's
    format, and where the source is in 16 bits its rows, from which the others are made; `end_byte`: the end of all.
    """

    spec: TensorSpec
    source: Source
    begin: int
    end: int
    first_row: int
    codes: int
    scales: int
    zeros: int
    values: int
    end_byte: int


def waves(specs: Sequence[TensorSpec], nbytes: int) -> Iterator[list[Piece]]:
    """The sources of all `specs` with a `quant`, as many at a time as fit `nbytes` together."""
    wave, end = list[Piece](), 0
    for spec in specs:
        if spec.quant is None:
            continue
        for piece in _pieces(spec):
            if wave and end + piece.end_byte > nbytes:
                yield wave
                wave, end = [], 0
            wave.append(_moved(piece, end))
            end += piece.end_byte
    if wave:
        yield wave


def staging_bytes(specs: Iterable[TensorSpec]) -> int:
    """What `waves` needs; 0 where nothing is quantised."""
    sizes = [piece.end_byte for spec in specs if spec.quant is not None for piece in _pieces(spec)]
    return max(max(sizes), min(sum(sizes), LARGEST_STAGING_BYTES)) if sizes else 0


def _pieces(spec: TensorSpec) -> Iterator[Piece]:
    """Each at the beginning of the staging area."""
    assert spec.quant is not None, spec.name
    first_row, quant = 0, spec.quant
    for source in spec.sources:
        num_rows, num_columns = source.shape
        step = num_rows if source.packing else max(_ROUNDED_BYTES // (_ITEM_BYTES * num_columns) // 64, 1) * 64
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            count, groups = end - begin, num_columns // quant.group_size
            scales = _aligned(count * num_columns * quant.bits // 8)
            zeros = scales + _aligned(count * groups * _ITEM_BYTES)
            values = zeros + _aligned(-(-count // 8) * 4 * groups)
            total = values + (0 if source.packing else _aligned(count * num_columns * _ITEM_BYTES))
            yield Piece(spec, source, begin, end, first_row + begin, 0, scales, zeros, values, total)
        first_row += num_rows


def _moved(piece: Piece, by: int) -> Piece:
    places = (piece.codes + by, piece.scales + by, piece.zeros + by, piece.values + by, piece.end_byte + by)
    return Piece(piece.spec, piece.source, piece.begin, piece.end, piece.first_row, *places)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
