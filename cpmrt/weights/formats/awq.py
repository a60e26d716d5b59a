"""AWQ: codes and zero points of eight outputs are packed in a word, in AWQ's own order (AutoAWQ: `WQLinear_GEMM`)."""

from __future__ import annotations

import numpy as np

from cpmrt.weights.formats.format import I32, SCALES, U8, Format, Part, pack_nibbles, transposed, unpack_nibbles

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble j of a word holds column AWQ_ORDER[j] of the word's eight."""
_PLACE = tuple(AWQ_ORDER.index(column) for column in range(8))


def pack(values: U8) -> I32:
    """Pack codes u [N, K] to `qweight` int32 [K, N/8], or zero points z [N, groups] to `qzeros` [groups, N/8]."""
    columns = np.ascontiguousarray(values.T).reshape(values.shape[1], -1, 8)
    return pack_nibbles(columns[:, :, AWQ_ORDER].reshape(values.shape[1], -1))


def unpack(words: I32) -> U8:
    """Unpack `qweight` to u [N, K], or `qzeros` to z [N, groups]; also a slice of their columns."""
    columns = unpack_nibbles(words).reshape(words.shape[0], -1, 8)
    return np.ascontiguousarray(columns[:, :, _PLACE].reshape(words.shape[0], -1).T)


AWQ = Format(
    "awq",
    number=1,
    codes=Part("qweight", lambda n, k, groups: (k, n // 8), pack, unpack),
    rows=lambda words, begin, end: words[:, begin // 8 : end // 8],
    scales=Part("scales", lambda n, k, groups: (groups, n), transposed, transposed, SCALES),
    zeros=Part("qzeros", lambda n, k, groups: (groups, n // 8), pack, unpack),
)
