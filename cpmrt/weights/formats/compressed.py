"""compressed-tensors `pack-quantized` (its `pack_to_int32`).

`weight_packed` int32 [N, K/8]: eight columns in a word; the signed codes -8..7 are stored plus 8, so they are u itself.
`weight_zero_point` int32 [N/8, groups]: packed along the output features.
"""

from __future__ import annotations

import numpy as np

from cpmrt.weights.formats.format import SCALES, Format, Part, pack_nibbles, transposed, unpack_nibbles

COMPRESSED = Format(
    "compressed",
    number=2,
    codes=Part("weight_packed", lambda n, k, groups: (n, k // 8), pack_nibbles, unpack_nibbles),
    rows=lambda words, begin, end: words[begin:end],
    scales=Part("weight_scale", lambda n, k, groups: (n, groups), np.asarray, np.asarray, SCALES),
    zeros=Part(
        "weight_zero_point",
        lambda n, k, groups: (n // 8, groups),
        pack=lambda z: transposed(pack_nibbles(z.T)),
        unpack=lambda words: transposed(unpack_nibbles(words.T)),
    ),
    zeros_if_symmetric=False,
    order="weight_g_idx",
    blank_order=True,
    shape="weight_shape",
)
