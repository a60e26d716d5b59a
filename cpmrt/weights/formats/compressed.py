"""compressed-tensors, `pack-quantized`: rows as in the matrix, eight columns in a word (its `pack_to_int32`).

Its signed codes -8..7 are stored plus 8, so they are u itself.
"""

from __future__ import annotations

import numpy as np

from cpmrt.weights.formats.format import I32, SCALES, U8, Format, Part, pack_nibbles, unpack_nibbles


def pack_zeros(z: U8) -> I32:
    """Pack `weight_zero_point` int32 [N/8, groups] of z [N, groups], along the output features."""
    return np.ascontiguousarray(pack_nibbles(z.T).T)


def unpack_zeros(weight_zero_point: I32) -> U8:
    """Unpack z [N, groups] of `weight_zero_point` [N/8, groups]."""
    return np.ascontiguousarray(unpack_nibbles(weight_zero_point.T).T)


COMPRESSED = Format(
    "compressed",
    number=2,
    codes=Part("weight_packed", lambda n, k, groups: (n, k // 8), pack_nibbles, unpack_nibbles),
    rows=lambda words, begin, end: words[begin:end],
    scales=Part("weight_scale", lambda n, k, groups: (n, groups), np.asarray, np.asarray, SCALES),
    zeros=Part("weight_zero_point", lambda n, k, groups: (n // 8, groups), pack_zeros, unpack_zeros),
    zeros_if_symmetric=False,
    order="weight_g_idx",
    blank_order=True,
    shape="weight_shape",
)
