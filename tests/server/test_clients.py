"""Common clients, each with its main uses: a plain answer, a stream, a tool call, an error, the usage.

They are no dependencies of the project; each skips where it is missing. `tests/deploy/test_litellm.py` has LiteLLM.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import saying_llm, serving

pytestmark = pytest.mark.all

ANSWER = "It is sunny."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose model calls the tool it is offered, and answers once there is a result."""

    def reply(prompt: str) -> str:
        return CALL if "[tools]" in prompt and "[tool]" not in prompt else ANSWER

    folder = tmp_path_factory.mktemp("clients")
    with serving(lambda: saying_llm(folder, reply), model_name="m") as running:
        yield running


@pytest.fixture
def url(server):
    return f"{server.url}/v1"


@pytest.fixture
def langchain(url):
    openai = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    return lambda **settings: openai.ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0, **settings)


def test_langchain_plain_stream_and_usage(langchain):
    answer = langchain().invoke("How is it?")
    assert answer.content == ANSWER and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == len(ANSWER) + 1 and answer.usage_metadata["input_tokens"] > 5
    chunks = list(langchain(stream_usage=True).stream("How is it?"))
    assert "".join(chunk.content for chunk in chunks) == ANSWER and len(chunks) > 3
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == len(ANSWER) + 1


def test_langchain_tools(langchain):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """Tell how the weather is in a city."""
        return f"sunny in {city}"

    model, question = langchain().bind_tools([weather]), HumanMessage("How is it in Bonn?")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Bonn"})
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.invoke([question, answer, result]).content == ANSWER


def test_langchain_errors(langchain):
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature"):
        langchain(temperature=-1).invoke("x")
    with pytest.raises(openai.BadRequestError, match="min_tokens is not supported"):
        langchain(extra_body={"min_tokens": 5}).invoke("x")


def test_instructor_reads_an_answer_into_a_type(url):
    instructor = pytest.importorskip("instructor", reason="needs instructor")
    import openai
    import pydantic

    class Weather(pydantic.BaseModel):
        """Tell how the weather is in a city."""

        city: str

    Weather.__name__ = "weather"
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.PARALLEL_TOOLS)
    from collections.abc import Iterable

    (found,) = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Bonn?"}], response_model=Iterable[Weather], tool_choice="auto"
    )
    assert found.city == "Bonn"


@pytest.fixture
def agent(url):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs pydantic-ai-slim[openai]")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="none"))
    return lambda **settings: pydantic_ai.Agent(model, **settings)


def test_pydantic_ai_plain_stream_and_usage(agent):
    result = agent().run_sync("How is it?")
    assert result.output == ANSWER
    usage = result.usage() if callable(result.usage) else result.usage
    assert usage.output_tokens == len(ANSWER) + 1 and usage.input_tokens > 5

    async def streamed():
        async with agent().run_stream("How is it?") as stream:
            return [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(streamed())
    assert "".join(pieces) == ANSWER and len(pieces) > 3


def test_pydantic_ai_tools_and_errors(agent):
    from pydantic_ai.exceptions import ModelHTTPError

    cities = []

    def weather(city: str) -> str:
        """Tell how the weather is in a city."""
        cities.append(city)
        return "sunny"

    assert agent(tools=[weather]).run_sync("How is it in Bonn?").output == ANSWER
    assert cities == ["Bonn"]
    with pytest.raises(ModelHTTPError) as caught:
        agent().run_sync("x", model_settings={"temperature": -1})
    assert caught.value.status_code == 400 and "temperature" in str(caught.value)


NODE = """
const { default: OpenAI } = require('openai');
const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0 });
const messages = [{ role: 'user', content: 'How is it?' }];
const tools = [{ type: 'function', function: { name: 'weather', parameters: { type: 'object' } } }];
(async () => {
  const found = {};
  const plain = await client.chat.completions.create({ model: 'm', messages });
  found.plain = plain.choices[0].message.content;
  found.usage = plain.usage.completion_tokens;
  found.pieces = [];
  for await (const chunk of await client.chat.completions.create({ model: 'm', messages, stream: true }))
    if (chunk.choices[0].delta.content) found.pieces.push(chunk.choices[0].delta.content);
  const called = await client.chat.completions.create({ model: 'm', messages, tools });
  found.call = called.choices[0].message.tool_calls[0].function;
  try { await client.chat.completions.create({ model: 'm', messages, temperature: -1 }); }
  catch (error) { found.error = [error.status, error.param, error.constructor.name]; }
  found.models = (await client.models.list()).data.map(model => model.id);
  console.log(JSON.stringify(found));
})();
"""


def run_node(script, *arguments, packages):
    """Run a script with node and return the JSON it prints; skip if node or the packages are missing."""
    node = shutil.which("node")
    required = ";".join(f"require('{name}')" for name in packages)
    if node is None or subprocess.run([node, "-e", required], capture_output=True).returncode:
        pytest.skip(f"needs node and packages of it (npm install {' '.join(packages)}, NODE_PATH)")
    done = subprocess.run([node, str(script), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_client_for_node(url, tmp_path):
    script = tmp_path / "client.cjs"
    script.write_text(NODE)
    found = run_node(script, url, packages=["openai"])
    assert found["plain"] == ANSWER == "".join(found["pieces"]) and len(found["pieces"]) > 3
    assert found["usage"] == len(ANSWER) + 1 and found["models"] == ["m"]
    assert found["call"]["name"] == "weather" and json.loads(found["call"]["arguments"]) == {"city": "Bonn"}
    assert found["error"] == [400, "temperature", "BadRequestError"]


@pytest.mark.parametrize("provider", ["openai-compatible", "openai"])
def test_the_ai_sdk(url, provider):
    script, packages = Path(__file__).with_name("ai_sdk.cjs"), ["ai", "zod", f"@ai-sdk/{provider}"]
    found = run_node(script, url, provider, packages=packages)
    *plain, num_prompt = found["plain"]
    assert plain == [ANSWER, "stop", len(ANSWER) + 1] and num_prompt > 5
    assert found["limited"] == [ANSWER[:3], "length"]
    assert "".join(found["pieces"]) == ANSWER and len(found["pieces"]) > 3
    assert found["streamed"] == ["stop", len(ANSWER) + 1]
    assert found["tools"] == [ANSWER, [[["weather", {"city": "Bonn"}]], []]]
    assert found["streamedTools"] == ANSWER and found["cities"] == ["Bonn", "Bonn"]
    assert found["parts"]["tool-call"] == found["parts"]["tool-result"] == 1 and "error" not in found["parts"]
    assert found["tooHot"][:2] == [True, 400] and "temperature" in found["tooHot"][2]
    assert found["noModel"][:2] == [True, 404] and "does not exist here" in found["noModel"][2]
    assert found["streamedError"][0] == 400 and "temperature" in found["streamedError"][1]
