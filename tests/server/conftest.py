"""Fixtures of the server tests: a server of the bundled model, one whose model says what a test asks for, a
certificate."""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("starlette")

from serving import saying_llm, serving

from cpmrt import LLM


@pytest.fixture(scope="session")
def demo():
    """A server of the bundled model for four sequences of 512 tokens at a time."""
    with serving(
        lambda: LLM(executor="reference", max_sequences=4, max_context=512, prefill_chunk=64), max_queue=12
    ) as server:
        yield server


@pytest.fixture(scope="session")
def says(tmp_path_factory):
    """A server whose model answers with the text between `say(` and `)yas` in the prompt, or else with the whole
    prompt."""

    def reply(prompt: str) -> str:
        return prompt.rpartition("say(")[2].partition(")yas")[0] if "say(" in prompt else prompt

    folder = tmp_path_factory.mktemp("says")
    with serving(lambda: saying_llm(folder, reply), model_name="says") as server:
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """The PEM files of a certificate for 127.0.0.1 and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl program")
    folder = tmp_path_factory.mktemp("tls")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*command, *files], check=True, capture_output=True, timeout=60)
    return folder / "cert.pem", folder / "key.pem"
