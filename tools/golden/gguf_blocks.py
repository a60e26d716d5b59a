"""Writes tests/golden/gguf_blocks.npz: random blocks of every GGUF type, and what the package `gguf` unpacks of them.

    python tools/golden/gguf_blocks.py        (needs the package gguf; gives the same bytes each time)

Per type: `<type>.rows` uint8 [2, bytes of two or more blocks] and `<type>.values` float32 [2, weights].
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"
)  # fmt: skip
ROWS = 2
GOLDEN = Path(__file__).resolve().parent.parent.parent / "tests" / "golden" / "gguf_blocks.npz"


def main() -> None:
    """Writes the file."""
    arrays, random = {}, np.random.Generator(np.random.PCG64(20))
    for name in TYPES:
        rows, values = finite_rows(gguf.GGMLQuantizationType[name], random)
        arrays |= {f"{name}.rows": rows, f"{name}.values": values}
    metadata = {"command": "python tools/golden/gguf_blocks.py", "numpy": np.__version__}
    np.savez_compressed(GOLDEN, metadata=np.array(json.dumps(metadata)), **arrays)
    print(f"{GOLDEN.name}: {GOLDEN.stat().st_size} bytes")


def finite_rows(kind: gguf.GGMLQuantizationType, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws rows of a type until no scale is NaN or infinite."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = max(256 // size, 2)
    while True:
        rows = random.integers(0, 256, (ROWS, blocks * nbytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.dequantize(rows, kind)
        if np.isfinite(values).all():
            return rows, values


if __name__ == "__main__":
    main()
