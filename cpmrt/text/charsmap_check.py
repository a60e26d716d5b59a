"""Checks SentencePiece's compiled table of character replacements (`Precompiled` in a tokenizer.json).

Format (sentencepiece, `normalizer.cc`; the `tokenizers` library reads it with the crate `spm_precompiled`), in base64:
the number of bytes of a trie as uint32, the trie (a double array of uint32 units), then the replacements as UTF-8, each
ended by a NUL. The reader follows the trie without a check of its bounds, so every step must lead to a unit and every
value to the beginning of a character.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

_LEAF, _VALUE = np.uint32(1 << 8), np.uint32((1 << 31) - 1)


def longest_replacement(charsmap: object) -> int:
    """Return the bytes of the longest replacement. Raises ValueError for a table that the reader cannot follow."""
    if not isinstance(charsmap, str):
        raise ValueError("it is not a text in base64")
    try:
        raw = base64.b64decode(charsmap, validate=True)
    except ValueError as error:
        raise ValueError("it is not base64") from error
    num_bytes = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 or num_bytes % 4 or not 4 <= num_bytes <= len(raw) - 4:
        raise ValueError("the trie is longer than the data")
    units = np.frombuffer(raw, "<u4", num_bytes // 4, offset=4)
    replacements = raw[4 + num_bytes :]
    replacements.decode("utf-8")
    _check_trie(units, np.frombuffer(replacements, np.uint8))
    return max(len(piece) for piece in replacements.split(b"\0"))


def _check_trie(units: NDArray[np.uint32], text: NDArray[np.uint8]) -> None:
    """Raise ValueError unless every step from every unit of the trie stays in bounds.

    A unit with the highest bit set is a value; from every other unit any of 256 bytes may lead on.
    """
    steps = units & ~_VALUE == 0
    steps[0] = True  # the reader steps on from the first unit even if it looks like a value
    offsets = (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))
    targets = np.arange(len(units), dtype=np.uint32)[steps] ^ offsets[steps]
    if len(targets) and int((targets | np.uint32(255)).max()) >= len(units):
        raise ValueError("the trie leads out of its units")
    values = units[targets[units[steps] & _LEAF != 0]] & _VALUE
    if len(values) and (int(values.max()) >= len(text) or (text[values] & 0xC0 == 0x80).any()):
        raise ValueError("a value of the trie is not the beginning of a replacement")
