"""Continue several prompts together, each in several ways: python examples/several_prompts.py [MODEL]"""

import sys

from cpmrt import LLM, SamplingParams

PROMPTS = ["def add(a, b):", "class Stack:", "import json\n", "for line in"]

with LLM(*sys.argv[1:], max_sequences=4) as llm:
    params = SamplingParams(max_new_tokens=16, temperature=0.8, seed=1, n=2)
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        for choice in completion.choices:
            print(f"--- {prompt}{choice.text}")
