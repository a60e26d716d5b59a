"""LangChain, pydantic-ai and instructor against a running server: plain, streaming, tools, errors, usage."""

from __future__ import annotations

import asyncio
import json

import pytest

TOOL_ANSWER = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}</tool_call>'


def say(text: str) -> str:
    return f"say({text})yas"


class TestLangChain:
    @pytest.fixture
    def chat(self, says):
        langchain_openai = pytest.importorskip("langchain_openai")
        return langchain_openai.ChatOpenAI(base_url=f"{says.url}/v1", api_key="none", model="says", max_retries=0)

    def test_plain_with_usage(self, chat):
        answer = chat.invoke(say("hello"))
        assert answer.content == "hello" and answer.usage_metadata["output_tokens"] == 6
        assert answer.response_metadata["finish_reason"] == "stop"

    def test_streaming(self, chat):
        chunks = list(chat.stream(say("hello"), stream_usage=True))
        assert "".join(chunk.content for chunk in chunks) == "hello" and len(chunks) > 3
        assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 6

    def test_tools(self, chat):
        def weather(city: str, days: int) -> str:
            """Tell the weather."""
            return f"rain in {city} for {days} days"

        (call,) = chat.bind_tools([weather]).invoke(say(TOOL_ANSWER)).tool_calls
        assert call["name"] == "weather" and call["args"] == {"city": "Bonn", "days": 2}

    def test_errors(self, chat):
        import openai

        with pytest.raises(openai.BadRequestError, match="temperature"):
            chat.invoke("x", temperature=-1)

    def test_embeddings(self, demo):
        langchain_openai = pytest.importorskip("langchain_openai")
        embeddings = langchain_openai.OpenAIEmbeddings(
            base_url=f"{demo.url}/v1", api_key="none", model="demo", check_embedding_ctx_length=False
        )
        first, second = embeddings.embed_documents(["import os", "import sys"])
        assert len(first) == len(second) and first != second and embeddings.embed_query("import os") == first


class TestPydanticAI:
    @pytest.fixture
    def model(self, says):
        pytest.importorskip("pydantic_ai")
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return OpenAIChatModel("says", provider=OpenAIProvider(base_url=f"{says.url}/v1", api_key="none"))

    def test_plain_with_usage(self, model):
        from pydantic_ai import Agent

        result = Agent(model).run_sync(say("hello"))
        assert result.output == "hello" and result.usage.output_tokens == 6

    def test_streaming(self, model):
        from pydantic_ai import Agent

        async def run():
            async with Agent(model).run_stream(say("hello")) as result:
                return [text async for text in result.stream_text(delta=True, debounce_by=None)]

        pieces = asyncio.run(run())
        assert "".join(pieces) == "hello" and len(pieces) > 1

    def test_a_tool_is_called_and_its_result_comes_back(self, tmp_path):
        """The model calls the tool once, then repeats what it was told."""
        pytest.importorskip("pydantic_ai")
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider
        from serving import saying_llm, serving

        def reply(prompt: str) -> str:
            told = prompt.rpartition("[tool]")[2].partition("[assistant]")[0]
            return f"I was told: {told}" if "[tool]" in prompt else TOOL_ANSWER

        with serving(lambda: saying_llm(tmp_path, reply), model_name="says") as server:
            provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
            agent = Agent(OpenAIChatModel("says", provider=provider))

            @agent.tool_plain
            def weather(city: str, days: int) -> str:
                return f"rain in {city} for {days} days"

            assert agent.run_sync("How is it?").output == "I was told: rain in Bonn for 2 days"

    def test_errors(self, model):
        from pydantic_ai import Agent
        from pydantic_ai.exceptions import ModelHTTPError

        with pytest.raises(ModelHTTPError) as caught:
            Agent(model, model_settings={"temperature": -1.0}).run_sync("x")
        assert caught.value.status_code == 400


class TestInstructor:
    def test_an_object_out_of_an_answer(self, says):
        instructor = pytest.importorskip("instructor")
        import openai
        from pydantic import BaseModel

        class Weather(BaseModel):
            city: str
            days: int

        client = openai.OpenAI(base_url=f"{says.url}/v1", api_key="none", max_retries=0)
        patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
        answer = "```json\n" + json.dumps({"city": "Bonn", "days": 2}) + "\n```"
        found = patched.chat.completions.create(
            model="says", response_model=Weather, max_retries=0, messages=[{"role": "user", "content": say(answer)}]
        )
        assert (found.city, found.days) == ("Bonn", 2)
