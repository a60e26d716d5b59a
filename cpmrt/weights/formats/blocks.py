"""The block types of GGUF files: how many weights a block has, in how many bytes, and how to take it apart.

A row of a matrix is a run of blocks. Blocks of every type are taken apart into the same three things: small integers
(codes), and for each group of neighbouring columns a scale and perhaps an offset, so that in float32

    W[n, k] = scale[n, k // group] * code[n, k] + offset[n, k // group]

Scales of a super-block of 256 weights are themselves a float16 times a small integer; the product is rounded to
float32, as the format's definition does. Source: ggml-common.h and ggml-quants.c of ggml, which define the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpmrt.dtypes import F32

U8 = NDArray[np.uint8]
Codes = NDArray[np.uint8] | NDArray[np.int8]
IQ4_VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
"""The values of the sixteen codes of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class Parts:
    """Blocks [n, bytes] taken apart: `codes` [n, size], `scales` and `offsets` float32 [n, size / group].

    `offsets` is None for a type without offsets.
    """

    codes: Codes
    scales: F32
    offsets: F32 | None = None


@dataclass(frozen=True)
class BlockType:
    """One block type, a row of `BLOCK_TYPES`: its `number` in the file, the bits of a code, the weights (`size`) and
    bytes of a block, and the columns of a group.

    `split` takes blocks uint8 [n, nbytes] apart; `halves` are the places in a block, in bytes, of its float16 numbers.
    """

    name: str
    number: int
    bits: int
    size: int
    nbytes: int
    group: int
    split: Callable[[U8], Parts]
    halves: tuple[int, ...] = (0,)

    @property
    def factor_bits(self) -> int:
        """Bits of the integer that a scale multiplies: those of a code, or 8 where codes are indices of `IQ4_VALUES`.
        """
        return 8 if self.name.startswith("IQ4") else self.bits

    @property
    def is_symmetric(self) -> bool:
        """Whether groups have scales and no offsets; a block with offsets has a second float16, for them."""
        return len(self.halves) == 1

    def all_finite(self, rows: U8) -> bool:
        """Whether all scales (and offsets) of rows uint8 [N, row bytes] are finite."""
        blocks = rows.reshape(len(rows), -1, self.nbytes)
        # The exponent of a float16 is the upper part of its second byte.
        return all(bool((blocks[:, :, place + 1] & 0x7C != 0x7C).all()) for place in self.halves)

    def row_bytes(self, num_columns: int) -> int:
        """Return the bytes of a row; `num_columns` is a multiple of `size`."""
        return num_columns // self.size * self.nbytes

    def parts(self, rows: U8) -> Parts:
        """Take rows uint8 [N, row bytes] apart: codes [N, K], scales and offsets [N, K / group]."""
        parts = self.split(np.ascontiguousarray(rows).reshape(-1, self.nbytes))
        shape = (len(rows), -1)
        offsets = None if parts.offsets is None else parts.offsets.reshape(shape)
        return Parts(parts.codes.reshape(shape), parts.scales.reshape(shape), offsets)

    def values(self, rows: U8) -> F32:
        """Return rows uint8 [N, row bytes] as float32 [N, K]."""
        parts = self.parts(rows)
        grouped = parts.codes.astype(np.float32).reshape(*parts.scales.shape, self.group)
        grouped *= parts.scales[..., None]
        if parts.offsets is not None:
            grouped += parts.offsets[..., None]
        return grouped.reshape(parts.codes.shape)


def _planes(packed: U8, bits: int, width: int) -> U8:
    """Unpack the fields of `bits` bits of bytes [n, m].

    Of each run of `width` bytes the lowest fields of all bytes come first, then the next fields of all bytes.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, width)
    fields: U8 = runs >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _half(blocks: U8, place: int) -> F32:
    """Return the float16 at byte `place` of each block as float32 [n, 1]."""
    words: NDArray[Any] = np.ascontiguousarray(blocks[:, place : place + 2]).view("<f2")
    return words.astype(np.float32)


def _high_bits(blocks: U8, place: int) -> U8:
    """Return the 32 bits at byte `place` of each block, the lowest (of the first weight) first, each as 0 or 16."""
    bits: U8 = np.unpackbits(blocks[:, place : place + 4], axis=1, bitorder="little")
    shifted: U8 = bits << np.uint8(4)
    return shifted


def _signed(codes: U8, zero: int) -> NDArray[np.int8]:
    signed: NDArray[np.int8] = codes.view(np.int8) - np.int8(zero)
    return signed


def _q4_0(blocks: U8) -> Parts:
    return Parts(_signed(_planes(blocks[:, 2:], 4, 16), 8), _half(blocks, 0))


def _q4_1(blocks: U8) -> Parts:
    return Parts(_planes(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: U8) -> Parts:
    return Parts(_signed(_planes(blocks[:, 6:], 4, 16) | _high_bits(blocks, 2), 16), _half(blocks, 0))


def _q5_1(blocks: U8) -> Parts:
    return Parts(_planes(blocks[:, 8:], 4, 16) | _high_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: U8) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _iq4_nl(blocks: U8) -> Parts:
    return Parts(IQ4_VALUES[_planes(blocks[:, 2:], 4, 16)], _half(blocks, 0))


def _q2_k(blocks: U8) -> Parts:
    scales, offsets = _half(blocks, 80) * (blocks[:, :16] & 15), _half(blocks, 82) * (blocks[:, :16] >> 4)
    return Parts(_planes(blocks[:, 16:80], 2, 32), scales, -offsets)


def _q3_k(blocks: U8) -> Parts:
    high = _planes(blocks[:, :32], 1, 32) << np.uint8(2)
    codes = _signed(_planes(blocks[:, 32:96], 2, 32) | high, 4)
    scales = _planes(blocks[:, 96:104], 4, 8) | _planes(blocks[:, 104:108], 2, 4) << np.uint8(4)
    return Parts(codes, _half(blocks, 108) * _signed(scales, 32))


def six_bit_scales(packed: U8) -> tuple[U8, U8]:
    """Unpack the 12 bytes of Q4_K and Q5_K: eight scales and eight minimums [n, 8] of 6 bits each."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)
    return scales, np.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=1)


def _q4_k(blocks: U8) -> Parts:
    scales, minimums = six_bit_scales(blocks[:, 4:16])
    return Parts(_planes(blocks[:, 16:], 4, 32), _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums))


def _q5_k(blocks: U8) -> Parts:
    scales, minimums = six_bit_scales(blocks[:, 4:16])
    codes = _planes(blocks[:, 48:], 4, 32) | _planes(blocks[:, 16:48], 1, 32) << np.uint8(4)
    return Parts(codes, _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums))


def _q6_k(blocks: U8) -> Parts:
    codes = _planes(blocks[:, :128], 4, 64) | _planes(blocks[:, 128:192], 2, 32) << np.uint8(4)
    return Parts(_signed(codes, 32), _half(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _iq4_xs(blocks: U8) -> Parts:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    scales = _planes(blocks[:, 4:8], 4, 1) | high.astype(np.uint8) << np.uint8(4)
    return Parts(IQ4_VALUES[_planes(blocks[:, 8:], 4, 16)], _half(blocks, 0) * _signed(scales, 32))


def _tq1_0(blocks: U8) -> Parts:
    """Take TQ1_0 blocks apart: a byte / 256 is a ternary fraction of five digits (of four in the last four bytes).

    Multiplying by 3 carries the first digit out of the byte.
    """
    digits = []
    for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = 3 ** np.arange(count, dtype=np.uint8)[:, None]
        fractions = blocks[:, None, begin:end] * powers  # the product's lowest 8 bits
        digits.append((fractions.astype(np.uint16) * np.uint16(3) >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return Parts(_signed(np.concatenate(digits, axis=1), 1), _half(blocks, 52))


def _tq2_0(blocks: U8) -> Parts:
    return Parts(_signed(_planes(blocks[:, :64], 2, 32), 1), _half(blocks, 64))


BLOCK_TYPES = {
    row.name: row
    for row in (
        BlockType("Q4_0", 2, 4, 32, 18, 32, _q4_0),
        BlockType("Q4_1", 3, 4, 32, 20, 32, _q4_1, (0, 2)),
        BlockType("Q5_0", 6, 5, 32, 22, 32, _q5_0),
        BlockType("Q5_1", 7, 5, 32, 24, 32, _q5_1, (0, 2)),
        BlockType("Q8_0", 8, 8, 32, 34, 32, _q8_0),
        BlockType("Q2_K", 10, 2, 256, 84, 16, _q2_k, (80, 82)),
        BlockType("Q3_K", 11, 3, 256, 110, 16, _q3_k, (108,)),
        BlockType("Q4_K", 12, 4, 256, 144, 32, _q4_k, (0, 2)),
        BlockType("Q5_K", 13, 5, 256, 176, 32, _q5_k, (0, 2)),
        BlockType("Q6_K", 14, 6, 256, 210, 16, _q6_k, (208,)),
        BlockType("IQ4_NL", 20, 4, 32, 18, 32, _iq4_nl),
        BlockType("IQ4_XS", 23, 4, 256, 136, 32, _iq4_xs),
        BlockType("TQ1_0", 34, 2, 256, 54, 256, _tq1_0, (52,)),
        BlockType("TQ2_0", 35, 2, 256, 66, 256, _tq2_0, (64,)),
    )
}
"""The block types by the names that GGUF has for them."""
