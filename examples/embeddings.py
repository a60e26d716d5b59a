"""Find the text that is nearest to a question: python examples/embeddings.py [MODEL]"""

import sys

from cpmrt import LLM

TEXTS = ["def read(path): return open(path).read()", "class Circle: radius = 1.0", "import os\nos.remove('file')"]
QUESTION = "def load(name): return open(name).read()"

with LLM(*sys.argv[1:]) as llm:
    likeness = llm.embed(TEXTS) @ llm.embed(QUESTION)  # vectors of length 1: cosines
    for cosine, text in sorted(zip(likeness.tolist(), TEXTS, strict=True), reverse=True):
        print(f"{cosine:.3f}  {text!r}")
