"""One server of the bundled model for a module, and one of a model that says what a test wants."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from serving import saying_llm, serving

from cpmrt import LLM


@pytest.fixture(scope="session")
def demo():
    """The bundled model, four sequences of 512 tokens at a time."""
    with serving(
        lambda: LLM(executor="reference", max_sequences=4, max_context=512, prefill_chunk=64), max_queue=12
    ) as server:
        yield server


@pytest.fixture(scope="session")
def says(tmp_path_factory):
    """Answers with what stands between `say(` and `)yas` in the prompt, else with the prompt itself."""

    def reply(prompt: str) -> str:
        return prompt.rpartition("say(")[2].partition(")yas")[0] if "say(" in prompt else prompt

    folder = tmp_path_factory.mktemp("says")
    with serving(lambda: saying_llm(folder, reply), model_name="says") as server:
        yield server
