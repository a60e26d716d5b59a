"""Show an answer as it is made, and stop when there is enough of it: python examples/stream.py [MODEL]"""

import sys

from cpmrt import LLM, SamplingParams

with LLM(*sys.argv[1:]) as llm:
    num_lines = 0
    with llm.stream("import os\n", SamplingParams(max_new_tokens=500, temperature=0)) as stream:
        for piece in stream:
            print(piece.text, end="", flush=True)
            num_lines += piece.text.count("\n")
            if num_lines >= 8:
                break  # leaving the block cancels the rest
    print(f"\n{stream.completion.finish_reason} after {len(stream.completion.token_ids)} tokens", file=sys.stderr)
