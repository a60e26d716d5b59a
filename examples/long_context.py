"""Read a long text with dense and with sparse attention, and compare: python examples/long_context.py [MODEL]

A model with a `sparse_config` (MiniCPM4, 4.1) is sparse by itself from 8K tokens on. These settings are for the small
context of the bundled model: from 128 tokens on, a token looks at the nearest 128, and at 2 more blocks of 64 that it
chooses.
"""

import argparse
import math
import sys
from pathlib import Path

from cpmrt import LLM

SPARSE = {"dense_len": 128, "window_size": 128, "topk": 2}

with LLM(*sys.argv[1:], sparse="off") as dense, LLM(*sys.argv[1:], sparse=SPARSE) as sparse:
    text = Path(argparse.__file__).read_text(encoding="utf-8")[2000:4000]
    ids = dense.tokenizer.encode(text)
    for name, llm in (("dense", dense), ("sparse", sparse)):
        print(f"{name}: perplexity {math.exp(-llm.score(ids).mean()):.3f} over {len(ids)} tokens")
