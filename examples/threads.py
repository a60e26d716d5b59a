"""Answer requests of several threads together, on one model: python examples/threads.py [MODEL]

Each answer is the one that the request would get alone.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from cpmrt import LLM, SamplingParams

PROMPTS = ["def add(a, b):", "class Stack:", "import json\n", "for line in"]
params = SamplingParams(max_new_tokens=24, temperature=0)

with LLM(*sys.argv[1:], max_sequences=len(PROMPTS)) as llm, ThreadPoolExecutor(len(PROMPTS)) as threads:
    completions = threads.map(lambda prompt: llm.generate(prompt, params), PROMPTS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(f"--- {prompt}{completion.text}")
