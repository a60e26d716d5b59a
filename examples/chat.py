"""Hold a conversation of several turns: python examples/chat.py [MODEL]

The second prompt begins with the whole first turn. With prefix_cache="fast" only its new part is computed.
"""

import sys

from cpmrt import LLM, SamplingParams

with LLM(*sys.argv[1:], prefix_cache="fast") as llm:
    messages = [{"role": "system", "content": "You explain Python in a few words."}]
    for question in ("What does os.path.join do?", "And os.path.split?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(max_new_tokens=40, temperature=0))
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}\n")
        stats = answer.stats
        print(f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were cached", file=sys.stderr)
