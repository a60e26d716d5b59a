"""A checkpoint with two LongRoPE lists warns when it is loaded, and can treat short texts as transformers does."""

import warnings

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM

ROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 256, "short_factor": [1.0] * 16,
    "long_factor": [1.0 + i / 2 for i in range(16)],
}  # fmt: skip
IDS = list(range(3, 43))


def logits(folder, **settings):
    with LLM(folder, executor="reference", **settings) as llm:
        return llm.logits(IDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("longrope"), rope_scaling=ROPE)


def test_a_context_beyond_the_original_range_warns(folder):
    with pytest.warns(UserWarning, match=r"context of 2048 tokens.*up to 256.*max_context=256.*list_by") as caught:
        LLM(folder, executor="reference").close()
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize("settings", [
    {"max_context": 256},
    {"hf_overrides": {"rope_scaling": {"list_by": "length"}}},
    {"hf_overrides": {"rope_scaling": {"long_factor": ROPE["short_factor"]}}},
])  # fmt: skip
def test_nothing_is_said_where_nothing_differs(folder, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(folder, executor="reference", **settings).close()


@pytest.mark.filterwarnings("ignore:LongRoPE")
def test_by_length_a_short_text_is_as_in_a_short_context(folder):
    short, long = logits(folder, max_context=256), logits(folder)
    assert np.abs(short - long).max() > 0.01
    assert np.array_equal(logits(folder, hf_overrides={"rope_scaling": {"list_by": "length"}}), short)
