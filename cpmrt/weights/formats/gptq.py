"""GPTQ as AutoGPTQ and GPTQModel write it (`qlinear`).

`qweight` int32 [K/8, N]: eight neighbouring input features of one output in a word. `qzeros` int32 [groups, N/8]: zero
points of eight outputs in a word; version 1 stores them minus one. In 8 bits a word has four: [K/4, N], [groups, N/4].
"""

from __future__ import annotations

import numpy as np

from cpmrt.weights.formats.format import (
    I32,
    SCALES,
    U8,
    Entries,
    Format,
    Part,
    Shape,
    pack_nibbles,
    transposed,
    unpack_nibbles,
)

V1_STEPS = {4: 0x11111111, 8: 0x01010101}
"""Bits of a zero point -> the number that version 1 subtracts from a 32-bit word of them: 1 in each."""
HEAD = "lm_head"


def to_v1(words: I32, bits: int = 4) -> I32:
    """Subtract one from every zero point, as version 1 stores them; a 0 borrows from the next, as in GPTQModel."""
    less: I32 = (words.view(np.uint32) - np.uint32(V1_STEPS[bits])).view(np.int32)
    return less


def from_v1(words: I32, bits: int = 4) -> I32:
    """Add one to every zero point, of 4 or 8 bits: the inverse of `to_v1`."""
    more: I32 = (np.ascontiguousarray(words, np.int32).view(np.uint32) + np.uint32(V1_STEPS[bits])).view(np.int32)
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


def _words(values: U8) -> I32:
    """Pack uint8 [..., 4 n] to int32 words [..., n], the first of four in the low bits."""
    return np.ascontiguousarray(values).view("<i4").astype(np.int32, copy=False)


def _bytes(words: I32) -> U8:
    """Unpack int32 words [..., n] to uint8 [..., 4 n]."""
    return np.ascontiguousarray(words, "<i4").view(np.uint8)


def _is_wide_head(module: str, shape: Shape, entries: Entries) -> bool:
    """Whether a module is an output head with codes of 8 bits, as GPTQModel makes with `lm_head=True`."""
    (num_rows, num_columns), codes = shape, entries.get(f"{module}.qweight")
    return module == HEAD and codes is not None and codes.shape == (num_columns // 4, num_rows)


GPTQ_HEAD = Format(
    "gptq 8-bit head",
    number=GPTQ.number,
    codes=Part(
        "qweight",
        lambda n, k, groups: (k // 4, n),
        pack=lambda u: transposed(_words(u)),
        unpack=lambda words: _bytes(words.T),
    ),
    rows=GPTQ.rows,
    scales=GPTQ.scales,
    zeros=Part(
        "qzeros",
        lambda n, k, groups: (groups, n // 4),
        pack=lambda z: _words(z.T),
        unpack=lambda words: transposed(_bytes(words)),
    ),
    order=GPTQ.order,
    row_step=4,
    settings=GPTQ.name,
    is_meant=_is_wide_head,
    bits=8,
)
