"""Continue a text, and see what it cost: python examples/generate.py [MODEL]"""

import sys

from cpmrt import LLM, SamplingParams

with LLM(*sys.argv[1:]) as llm:
    params = SamplingParams(max_new_tokens=48, temperature=0.8, top_p=0.9, seed=1)
    prompt = "def read_lines(path):"
    completion = llm.generate(prompt, params)
    print(prompt + completion.text)
    print(f"ended by {completion.finish_reason}, {completion.stats.decode_tokens_per_s:.0f} tokens/s", file=sys.stderr)
