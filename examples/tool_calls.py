"""Let a model call a tool, and tell it what that gave: python examples/tool_calls.py [MODEL]

The chat template of MODEL must have a place for tools. The bundled model's has none, so without MODEL it is made to
call the tool by its name, for which llguidance is needed; what it asks the tool makes little sense.
"""

import json
import sys

from cpmrt import LLM, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def weather(city: str, days: int = 1) -> str:
    """Stand for a real service."""
    return f"{city}: sunny for {days} days"


with LLM(*sys.argv[1:]) as llm:
    params = SamplingParams(max_new_tokens=256)
    messages = [{"role": "user", "content": "What is the weather in Beijing, today and tomorrow?"}]
    answer = llm.chat(messages, params, tools=[WEATHER], tool_choice="auto" if sys.argv[1:] else "weather")
    if answer.tool_calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls]
        calls = [{"id": f"call_{n}", "type": "function", "function": each} for n, each in enumerate(functions)]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        for call, asked in zip(calls, answer.tool_calls, strict=True):
            arguments = json.loads(asked.arguments)
            result = weather(**arguments)
            print(f"{asked.name}({arguments}): {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        answer = llm.chat(messages, params if sys.argv[1:] else SamplingParams(max_new_tokens=16))
    print(answer.text)
