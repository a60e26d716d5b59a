"""Keys or values in 8 bits, as they reach the ops in place of an array of pages.

An element is an e4m3 code (OCP 8-bit floating point, the variant without infinities) times the scale of its page and KV
head, a power of two. The page's first token alone decides the scale, before any other is stored: how tokens are grouped
into steps changes no bit, and nothing is ever rewritten. Its largest magnitude lies at most at 448 / HEADROOM; what a
later token has beyond 448 becomes 448. Since e4m3 is a floating-point type the headroom costs no precision: three bits
of mantissa are kept down to 1 / (2^6 * 448 / HEADROOM) of that magnitude, at least. On held-out text the bundled model
has 0.9 % of its elements beyond 448 without headroom, 1 in 100,000 with 4, none with 8 or more; from 4 to 512 the loss
is the same 0.001 bits a byte.

Nodes of a draft tree have no place here: their keys and values move when they are accepted, to pages of other scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LARGEST = 448.0
HEADROOM = 64
"""A page's first token may be this many times smaller than a later one. Those that draw attention without meaning it,
such as the first of a sequence, have values many times smaller than others."""
SCALE_EXPONENTS = (-8, 7)
"""Of the smallest and largest scale: at 2^-8 all of fp8 up to 1.75 is there, at 2^7 all that fp16 holds."""


@dataclass(frozen=True, eq=False, slots=True)
class Fp8Pages:
    """`codes` uint8 [..., P, K, 64, D], `scales` float32 [..., P, K]; the arrays are of the executor's own kind."""

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the elements."""
        return tuple(self.codes.shape)

    def __getitem__(self, layer: int) -> Fp8Pages:
        return Fp8Pages(self.codes[layer], self.scales[layer])
