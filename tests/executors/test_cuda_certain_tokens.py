"""Which step takes a certain token changes no bit on a GPU: a masked one, one with other rows, one that drafts."""

from __future__ import annotations

import pytest
from executors.certain_cases import DRAFT, FORMATS, LENGTH, SIZES, check_same, taken, wanted_tokens
from executors.cuda_models import write_model
from executors.hybrid_checkpoint import write_hybrid

from cpmrt import LLM

pytestmark = pytest.mark.gpu
PROMPT = [5 + number * number % 17 for number in range(150)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("minicpm"), SIZES)

    def open_one(name, **settings):
        wishes = {"model": folder, "executor": "cuda", "max_context": LENGTH, "prefill_chunk": 64}
        return LLM(**wishes | FORMATS[name] | settings)

    return open_one


@pytest.mark.parametrize("name", FORMATS)
def test_rows_leave_what_steps_leave(opened, name):
    prompt, wanted = PROMPT * 2 if "sparse" in name else PROMPT, wanted_tokens(150, 3)
    with opened(name, max_sequences=3) as llm:
        plain = taken(llm.executor, prompt, wanted, [0])
        for most in ([31], [2], [1, 4, DRAFT, 0, 9, 17]):
            found = taken(llm.executor, prompt, wanted, most)
            check_same(found, plain)
        assert max(found[2]) == min(17, llm.executor.limits.certain_rows - 1)
        check_same(taken(llm.executor, prompt, wanted, [7, 31], others=(1, 2)), plain)
    with opened(name, max_sequences=1) as llm:
        check_same(taken(llm.executor, prompt, wanted, [3, 31, DRAFT, 0]), plain)


@pytest.mark.parametrize("settings", [{"cuda_graphs": False}, {"dependent_launch": False}, {"steps_per_launch": 4}])
@pytest.mark.parametrize("name", ["bfloat16", "bundled"])
def test_other_ways_to_launch_leave_the_same(opened, name, settings):
    wanted = wanted_tokens(70, 4)
    with opened(name) as llm:
        plain = taken(llm.executor, PROMPT, wanted, [0])
    with opened(name, **settings) as llm:
        check_same(taken(llm.executor, PROMPT, wanted, [5, DRAFT, 0, 31]), plain)


def test_a_recurrent_state_takes_none(tmp_path):
    with LLM(write_hybrid(tmp_path), executor="cuda", max_context=256) as llm:
        assert llm.executor.limits.certain_rows == 0
