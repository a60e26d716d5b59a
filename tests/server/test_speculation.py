"""What `/metrics` tells of speculative steps."""

from __future__ import annotations

import pytest
from serving import serving

from cpmrt import LLM

QUESTION = "What does os.path.join do? What does os.path.join do? What does"


@pytest.fixture(scope="module")
def server():
    with serving(lambda: LLM(executor="reference", max_context=256, draft="lookup")) as running:
        yield running


def test_metrics_count_speculative_steps_and_their_tokens(server):
    names = ("cpmrt_speculative_steps_total", "cpmrt_speculative_tokens_total", "cpmrt_accept_length_count")
    assert [server.metric(name) for name in names] == [0, 0, 0]
    for count in (1, 2):
        server.chat(QUESTION, max_tokens=20, temperature=0, ignore_eos=True)
        steps, tokens, sequences = (server.metric(name) for name in names)
        assert tokens == 19 * count, "the first token comes from the prefill"
        assert 0 < steps <= tokens and sequences == count
