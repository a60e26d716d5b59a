"""Models from GGUF files: the same logits as the same weights from safetensors, for every architecture and type."""

import gguf_models as models
import numpy as np
import pytest
from reference.golden_models import relative

from cpmrt import LLM, SamplingParams
from cpmrt.quantization.gguf_conversion import FILE_TYPES, to_gguf
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.hub import BUNDLED
from cpmrt.weights.model_folder import ModelFolder

PROMPT = "Every good boy deserves fudge, and so on: 1 2 3."


def logits(model, **options):
    """Return the scores of the prompt's tokens, and a few greedy tokens after it."""
    with LLM(model, executor="reference", dtype="float32", max_context=256, **options) as llm:
        ids = llm.tokenizer.encode(PROMPT)
        return llm.score(ids), llm.generate(ids, SamplingParams(max_new_tokens=8)).token_ids


KINDS = ["BF16", "mixed", *(pytest.param(kind, marks=pytest.mark.all) for kind in ("F32", "Q8_0"))]


@pytest.mark.parametrize("architecture", models.CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_architecture(tmp_path, architecture, kind):
    pair = models.write_pair(tmp_path, architecture, models.mixed if kind == "mixed" else lambda name: kind)
    (found, tokens), (expected, expected_tokens) = logits(pair.gguf), logits(pair.folder)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    assert tokens == expected_tokens


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F16"])
def test_every_type_keeps_its_own_bits(tmp_path, kind):
    """The model has one layer and a tied embedding: the head is its blocks, products are those of the values."""
    pair = models.write_pair(
        tmp_path, "llama", lambda name: kind, num_hidden_layers=1, tie_word_embeddings=True, head_dim=128
    )
    (found, tokens), (expected, expected_tokens) = logits(pair.gguf), logits(pair.folder)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    assert tokens == expected_tokens


@pytest.mark.parametrize("architecture", ["llama", "minicpm", "qwen3"])
def test_rounding_changes_every_position_a_little(tmp_path, architecture):
    """No position's logits change much by rounding to 16 bits, so attention still looks at the same tokens.

    The tests on a GPU rely on this.
    """
    path, ids = models.write_pair(tmp_path, architecture, models.mixed).gguf, list(range(3, 203, 2))
    found = []
    for dtype in ("float16", "float32"):
        with LLM(path, executor="reference", dtype=dtype, max_context=256) as llm:
            found.append(llm.logits(ids))
    errors = [relative(*rows) for rows in zip(*found, strict=True)]
    assert max(errors) < 5 * np.median(errors) < 0.02


def test_config_is_that_of_the_folder(tmp_path):
    for architecture in models.CONFIGS:
        pair = models.write_pair(tmp_path, architecture, lambda name: "F32")
        found, expected = ModelFolder.open(pair.gguf), ModelFolder.open(pair.folder)
        assert found.config == expected.config and found.sampling == expected.sampling


def test_weights_take_the_bytes_of_their_blocks(tmp_path):
    """A quantised model is held in the blocks of its file; only the embedding becomes wider."""
    pair = models.write_pair(tmp_path, "llama", models.mixed)
    with LLM(pair.gguf, executor="reference", max_context=64) as llm:
        held = {region.name: region.nbytes for region in llm.plan.regions}
    sizes = models.SIZES
    row = BLOCK_TYPES["Q4_K"]
    assert held["layers.0.qkv.blocks0"] == sizes["hidden_size"] * row.row_bytes(sizes["hidden_size"])
    assert held["layers.0.qkv.blocks2"] == 128 * BLOCK_TYPES["Q6_K"].row_bytes(sizes["hidden_size"])
    assert held["lm_head.blocks0"] == 260 * BLOCK_TYPES["Q6_K"].row_bytes(sizes["hidden_size"])
    assert not any(name.endswith(("qkv", "down", "lm_head")) for name in held)


@pytest.mark.parametrize("draft", [str(BUNDLED / "eagle2"), pytest.param("q4_k", marks=pytest.mark.all)])
def test_drafts_beside_a_file_change_no_token(tmp_path, draft):
    """A GGUF file may be the target, whose head in blocks gives rows to the draft, and another one the draft."""
    for kind in {"q8_0", draft} & FILE_TYPES.keys():
        to_gguf(ModelFolder.open(BUNDLED), tmp_path / f"{kind}.gguf", kind)
    params, found = SamplingParams(max_new_tokens=12), []
    path = str(tmp_path / f"{draft}.gguf") if draft in FILE_TYPES else draft
    for options in ({}, {"draft": path}):
        with LLM(tmp_path / "q8_0.gguf", executor="reference", max_context=128, **options) as llm:
            found.append(llm.generate("def read_lines(path):", params))
    assert found[0].token_ids == found[1].token_ids
    assert found[1].stats.mean_accept_length > 1.1
