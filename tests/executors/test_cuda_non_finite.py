"""Logits that are no numbers end their own sequence on a GPU too, with an error that says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.cuda_models import BASE, ROWS, write_model
from reference.tiny_models import random_weights

from cpmrt import LLM, SamplingParams
from cpmrt.config import ModelConfig
from cpmrt.errors import NonFiniteLogitsError
from cpmrt.models.decoder import tensor_specs

pytestmark = pytest.mark.gpu

POISON = 50
FORCED = SamplingParams(max_new_tokens=6, logit_bias={POISON: 100.0}, ignore_eos=True)
FREE = {"max_new_tokens": 6, "logit_bias": {POISON: -100.0}, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one token's embedding is NaN, and so are the logits after it."""
    config = BASE | ROWS["minicpm"] | {"tie_word_embeddings": False}
    weights = random_weights(tensor_specs(ModelConfig.from_hf(config)), 7)
    weights["embed_tokens"][POISON] = np.nan
    return write_model(tmp_path_factory.mktemp("poisoned"), config, weights)


def open_llm(checkpoint: Path, **settings: Any) -> LLM:
    return LLM(checkpoint, **{"executor": "cuda", "max_context": 256, "dtype": "bfloat16"} | settings)


@pytest.mark.parametrize("settings", [{}, {"draft": "lookup"}, {"steps_per_launch": 4}], ids=str)
@pytest.mark.parametrize("sampling", [{}, SAMPLED, {"logprobs": 3}], ids=["greedy", "sampled", "logprobs"])
def test_the_answer_ends_where_it_happens(
    checkpoint: Path, settings: dict[str, Any], sampling: dict[str, Any]
) -> None:
    with open_llm(checkpoint, **settings) as llm:
        healthy = llm.generate([5, 6, 7], SamplingParams(**FREE, **sampling))
        assert len(healthy.token_ids) == 6
        with pytest.raises(NonFiniteLogitsError, match="position 3 "):
            llm.generate([5, 6, POISON], SamplingParams(**FREE, **sampling))
        stream = llm.stream([5, 6, 7, 8], FORCED)
        with pytest.raises(NonFiniteLogitsError, match="position 5 "):
            stream.finish()
        assert stream.completion.token_ids == (POISON,)
        assert llm.generate([5, 6, 7], SamplingParams(**FREE, **sampling)).token_ids == healthy.token_ids


def test_other_sequences_go_on(checkpoint: Path) -> None:
    with open_llm(checkpoint, max_sequences=3) as llm:
        alone = llm.generate([9, 8], SamplingParams(**FREE, **SAMPLED))
        streams = [llm.stream([5, 6, 7], FORCED), llm.stream([9, 8], SamplingParams(**FREE, **SAMPLED))]
        with pytest.raises(NonFiniteLogitsError):
            streams[0].finish()
        assert streams[1].finish().token_ids == alone.token_ids
