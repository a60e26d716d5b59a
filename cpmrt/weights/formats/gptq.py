"""GPTQ: eight input features of one output in a word, zero points of eight outputs (AutoGPTQ, GPTQModel: `qlinear`)."""

from __future__ import annotations

import numpy as np

from cpmrt.weights.formats.format import I32, SCALES, U8, Format, Part, pack_nibbles, transposed, unpack_nibbles

V1_STEP = 0x11111111
"""What version 1 takes from each word of zero points, which it stores minus one."""


def pack_codes(u: U8) -> I32:
    """Pack `qweight` int32 [K/8, N] of codes u [N, K]."""
    return np.ascontiguousarray(pack_nibbles(u).T)


def unpack_codes(qweight: I32) -> U8:
    """Unpack u [N, K] of `qweight` [K/8, N], or of a slice of its columns."""
    return unpack_nibbles(qweight.T)


def pack_zeros(z: U8) -> I32:
    """Pack `qzeros` int32 [groups, N/8] of z [N, groups], as version 2 stores them."""
    return pack_nibbles(z.T)


def unpack_zeros(qzeros: I32) -> U8:
    """Unpack z [N, groups] of `qzeros` [groups, N/8]."""
    return np.ascontiguousarray(unpack_nibbles(qzeros).T)


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
    codes=Part("qweight", lambda n, k, groups: (k // 8, n), pack_codes, unpack_codes),
    rows=lambda words, begin, end: words[:, begin:end],
    scales=Part("scales", lambda n, k, groups: (groups, n), transposed, transposed, SCALES),
    zeros=Part("qzeros", lambda n, k, groups: (groups, n // 8), pack_zeros, unpack_zeros),
    order="g_idx",
)
