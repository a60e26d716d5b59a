"""Philox4x32-10, the counter-based random generator of the sampling chain.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), constants of the Random123 library.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_ROUNDS = 10
_BELOW_ONE = np.float32(1 - 2.0**-24)


def philox(counters: U32, key: int) -> U32:
    """Return four random words for each counter: uint32 [n, 4] for counters uint32 [n, 4] and a 64-bit key."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    key_low, key_high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = product1 >> np.uint64(32) ^ c1 ^ np.uint64(key_low)
        c2 = product0 >> np.uint64(32) ^ c3 ^ np.uint64(key_high)
        c1, c3 = product1 & _LOW, product0 & _LOW
        key_low, key_high = key_low + _WEYL[0] & 0xFFFFFFFF, key_high + _WEYL[1] & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """Return standard Gumbel noise float32 [count] of the token at `position`: entry i is word i % 4 of counter i // 4.

    The counter is (i // 4, position, 0, 0), the key the seed.
    """
    counters = np.zeros((-(-count // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters), dtype=np.uint32)
    counters[:, 1] = np.uint32(position)
    return noise_of(philox(counters, seed & (2**64 - 1)).reshape(-1)[:count])


def noise_of(words: U32) -> NDArray[np.float32]:
    """Return -log(-log(1 - u)) with u = (word + 1/2) / 2^32, rounded to float32 and below 1.

    The largest noise comes from small u, which keep all 32 bits, so that tokens of probability 1e-9 are drawn too.
    """
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    noise: NDArray[np.float32] = -np.log(-np.log1p(-np.minimum(uniform, _BELOW_ONE)))
    return noise
