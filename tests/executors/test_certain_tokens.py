"""Which step takes a certain token changes no bit (NumPy): a masked one, one with other rows, or one that drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
from executors.certain_cases import DRAFT, FORMATS, LENGTH, SIZES, VOCAB, check_same, taken, wanted_tokens
from executors.cuda_models import write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmrt import LLM

PROMPT = [5 + number * number % 17 for number in range(150)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory):
    folder = write_model(tmp_path_factory.mktemp("minicpm"), SIZES)
    found: dict[str, LLM] = {}

    def open_one(name: str) -> LLM:
        if name not in found:
            wishes = {"model": folder, "executor": "reference", "max_context": LENGTH, "prefill_chunk": 64}
            found[name] = LLM(**wishes | {"max_sequences": 3} | FORMATS[name])
        return found[name]

    yield open_one
    for llm in found.values():
        llm.close()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_leave_what_steps_leave(opened, name: str, tmp_path: Path) -> None:
    executor = opened(name).executor
    prompt, wanted = PROMPT * 2 if "sparse" in name else PROMPT, wanted_tokens(90, 3)
    plain = taken(executor, prompt, wanted, [0])
    assert len(plain[0]) == 90 and max(plain[0]) < max(VOCAB, opened(name).config.vocab_size)
    for most in ([31], [1, 4, DRAFT, 0, 9]):
        found = taken(executor, prompt, wanted, most)
        check_same(found, plain)
    assert max(found[2]) == 9
    check_same(taken(executor, prompt, wanted, [7, 31], others=(1, 2)), plain)


@given(
    st.sampled_from(["lookup", "bundled"]),
    st.lists(st.one_of(st.integers(0, 31), st.just(DRAFT)), min_size=1, max_size=9), st.integers(0, 4),
    st.sampled_from([(), (1,), (2, 1)]),
)
@settings(max_examples=12)
def test_any_mix_of_steps_gives_the_same(opened, name: str, most, seed: int, others) -> None:
    executor, wanted = opened(name).executor, wanted_tokens(50, seed)
    check_same(taken(executor, PROMPT, wanted, most, others), taken(executor, PROMPT, wanted, [0]))


def test_a_step_that_brings_the_last_tokens_ends_the_sequence(opened) -> None:
    """Certain tokens count towards the length that is wanted, and a slot that has finished takes no more."""
    from cpmrt.config import Sampling
    from cpmrt.executor import Admit, Decode, Prefill, Release

    executor = opened("bfloat16").executor
    executor.submit(Admit(0, Sampling(), 3, 5, ()))
    executor.submit(Prefill(0, (5, 6, 7), 0, True)).wait()
    found = [executor.submit(Decode((0,), certain=certain)).wait().slots[0] for certain in (((9, 8, 9),), (), ((4,),))]
    assert found[0].token_ids[:3] == (9, 8, 9) and len(found[0].token_ids) == 4
    assert found[1].token_ids == found[2].token_ids == ()
    executor.submit(Release(0))
