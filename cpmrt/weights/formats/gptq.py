"""GPTQ as AutoGPTQ and GPTQModel write it (`qlinear`).

`qweight` int32 [K/8, N]: eight neighbouring input features of one output in a word. `qzeros` int32 [groups, N/8]: zero
points of eight outputs in a word; version 1 stores them minus one.
"""

from __future__ import annotations

import numpy as np

from cpmrt.weights.formats.format import I32, SCALES, Format, Part, pack_nibbles, transposed, unpack_nibbles

V1_STEP = 0x11111111
"""What version 1 takes from each word of zero points."""


def to_v1(words: I32) -> I32:
    """Take one from every zero point, as version 1 stores them; one of 0 borrows from the next, as in GPTQModel."""
    less: I32 = (words.view(np.uint32) - np.uint32(V1_STEP)).view(np.int32)
    return less


def from_v1(words: I32) -> I32:
    """Add one to every zero point: the inverse of `to_v1`."""
    more: I32 = (np.ascontiguousarray(words, np.int32).view(np.uint32) + np.uint32(V1_STEP)).view(np.int32)
    return more


GPTQ = Format(
    "gptq",
    number=0,
    codes=Part(
        "qweight",
        lambda n, k, groups: (k // 8, n),
        pack=lambda u: transposed(pack_nibbles(u)),
        unpack=lambda words: unpack_nibbles(words.T),
    ),
    rows=lambda words, begin, end: words[:, begin:end],
    scales=Part("scales", lambda n, k, groups: (groups, n), transposed, transposed, SCALES),
    zeros=Part(
        "qzeros",
        lambda n, k, groups: (groups, n // 8),
        pack=lambda z: pack_nibbles(z.T),
        unpack=lambda words: transposed(unpack_nibbles(words)),
    ),
    order="g_idx",
)
