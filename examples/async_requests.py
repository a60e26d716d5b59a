"""Answer requests of an event loop: python examples/async_requests.py [MODEL]

Requests run together. One is read piece by piece meanwhile, and one is given up: its task is cancelled.
"""

import asyncio
import sys

from cpmrt import LLM, AsyncLLM, SamplingParams


async def main(llm: AsyncLLM) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0)
    together = asyncio.gather(*(llm.generate(prompt, params) for prompt in ("def add(a, b):", "class Stack:")))
    given_up = asyncio.create_task(llm.generate("import os", SamplingParams(max_new_tokens=2000, ignore_eos=True)))
    async for piece in llm.stream("for line in", params):
        print(piece.text, end="", flush=True)
    given_up.cancel()
    for completion in await together:
        print("---" + completion.text)
    print("given up:", (await asyncio.gather(given_up, return_exceptions=True))[0].__class__.__name__)


async def run() -> None:
    async with AsyncLLM(LLM(*sys.argv[1:], max_sequences=4)) as llm:
        await main(llm)


asyncio.run(run())
