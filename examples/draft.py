"""Decode faster with a draft, to exactly the same text: python examples/draft.py [MODEL [DRAFT]]

Without arguments: the bundled model with its EAGLE-2 draft. Without DRAFT: a lookup, which any model can have.
"""

import argparse

from cpmrt import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?")
parser.add_argument("draft", nargs="?")
args = parser.parse_args()
draft = args.draft or ("lookup" if args.model else "eagle2")
params = SamplingParams(max_new_tokens=64, temperature=0.7, seed=3)
texts = []
for chosen in (None, draft):
    with LLM(args.model, draft=chosen) as llm:
        completion = llm.generate("class Queue:\n    def __init__(self):", params)
        texts.append(completion.text)
        stats = completion.stats
        num_accepted = stats.mean_accept_length or 1
        print(f"draft {chosen}: {stats.decode_tokens_per_s:.0f} tokens/s, {num_accepted:.2f} tokens a step")
assert texts[0] == texts[1]
print(texts[0])
