"""Show a model its tools, read the calls in its answer, and give it the results: python examples/tool_calls.py [MODEL]

The bundled model is too small to call a tool, so without MODEL an answer of MiniCPM5 stands in for the model's.
The chat template of MODEL must have a place for tools.
"""

import json
import sys

from cpmrt import LLM, SamplingParams
from cpmrt.server.chat_text import ChatText, Message
from cpmrt.tool_use.calls import schemas_of

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
STAND_IN = '<function name="weather"><param name="city">Beijing</param><param name="days">2</param></function>'


def weather(city: str, days: int = 1) -> str:
    """Stand for a real service."""
    return f"{city}: sunny for {days} days"


with LLM(*sys.argv[1:]) as llm:
    params = SamplingParams(max_new_tokens=256)
    messages = [{"role": "user", "content": "What is the weather in Beijing, today and tomorrow?"}]
    answer = llm.chat(messages, params, tools=[WEATHER]).text if sys.argv[1:] else STAND_IN
    reader, message = ChatText(None, schemas_of([WEATHER])), Message()
    message.add(reader.push(answer) + reader.flush())
    messages.append(message.content())
    for call in messages[-1].get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        print(f"{call['function']['name']}({arguments})")
        call["function"]["arguments"] = arguments  # templates want an object
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": weather(**arguments)})
    print(messages[-1]["content"])
    print(llm.chat(messages, params if sys.argv[1:] else SamplingParams(max_new_tokens=16)).text)
