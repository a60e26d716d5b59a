"""Reading a DSpark draft's folder against its target: the published draft, and every disagreement refused by name."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from draft_checkpoint import (
    DSPARK,
    HIDDEN,
    MARKOV_RANK,
    TARGET,
    VOCAB,
    dspark_tensors,
    eagle3_tensors,
    target_tensors,
    write_folder,
)

from cpmrt.config import EngineConfig, ModelConfig, SpeculationConfig, TreeShape
from cpmrt.config.draft import Block, detect_method
from cpmrt.config.dspark import chains_of, read_dspark
from cpmrt.config.speculation import DRAFT_METHODS
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.precompile import known_device
from cpmrt.errors import CheckpointError, ConfigError, UnsupportedModelError
from cpmrt.models.draft import tensor_specs
from cpmrt.models.draft_weights import open_draft
from cpmrt.models.planning import plan_model, weight_specs
from cpmrt.weights.draft_folder import method_of
from cpmrt.weights.model_folder import ModelFolder

MINICPM = ModelConfig.from_hf(TARGET)
WISH = SpeculationConfig("dspark", (TreeShape.chain(4),))
MINICPM5_2B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 42, "intermediate_size": 6144,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 130560, "rms_norm_eps": 1e-6,
    "rope_theta": 5e6, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
MINICPM5_2B_DSPARK = MINICPM5_2B | {
    "num_hidden_layers": 5, "rope_theta": None, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"},
    "block_size": 7, "mask_token_id": 75982, "markov_rank": 256, "markov_head_type": "vanilla",
    "sample_from_anchor": True, "confidence_head_with_markov": True, "target_layer_ids": [1, 10, 20, 30, 39],
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip


def read(changes=(), tensors=None, target=MINICPM, wish=WISH):
    shapes = None if tensors is None else {name: array.shape for name, array in tensors.items()}
    return read_dspark({**DSPARK, **dict(changes)}, shapes, target, wish)


def opened(tmp_path, tensors, changes=(), **wishes):
    folder = ModelFolder.open(write_folder(tmp_path / "target", TARGET, target_tensors()))
    write_folder(tmp_path / "draft", {**DSPARK, **dict(changes)}, tensors)
    wish = SpeculationConfig("dspark", **{"shapes": DRAFT_METHODS["dspark"].shapes} | wishes)
    settings = EngineConfig(draft=str(tmp_path / "draft"), speculation=wish)
    with open_draft(folder, settings, weight_specs(folder.config, settings)) as (_, draft):
        return draft


def test_the_draft_of_minicpm5_as_published():
    """The published draft has 62 tensors and 323,776,001 parameters, and its RoPE is read from rope_parameters
    alone."""
    draft = read_dspark(MINICPM5_2B_DSPARK, None, ModelConfig.from_hf(MINICPM5_2B), WISH)
    sources = {source.name: source.shape for spec in tensor_specs(draft) for source in spec.sources}
    assert len(sources) == 62 and sum(map(prod, sources.values())) == 323_776_001
    assert sources["fc.weight"] == (2048, 10240)
    assert sources["markov_head.markov_w2.weight"] == (130560, 256)
    assert sources["confidence_head.proj.weight"] == (1, 2304)
    assert sources["layers.4.self_attn.k_norm.weight"] == (128,)
    assert draft.block == Block(7, 75982, 256, True)
    # The output of a layer is tapped as the input of the next one.
    assert (draft.taps, draft.hidden_width) == ((2, 11, 21, 31, 40), 5 * 2048)
    config = draft.layers_config
    assert (config.rope.theta, config.num_layers, config.attention.qk_norm) == (5e6, 5, True)


def test_a_draft_of_qwen3():
    own = QWEN3_8B | {
        "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 5, "block_size": 7, "mask_token_id": 151669,
        "markov_rank": 256, "target_layer_ids": [1, 9, 17, 25, 33], "num_target_layers": 36,
        "enable_confidence_head": True, "layer_types": ["full_attention"] * 5,
    }  # fmt: skip
    draft = read_dspark(own, None, ModelConfig.from_hf(QWEN3_8B), WISH)
    assert draft.taps == (2, 10, 18, 26, 34) and draft.layers_config.rope.theta == 1e6
    assert draft.layers_config.attention.num_kv_heads == 8


def test_names_within_dflash_config_count_too():
    moved = {name: DSPARK[name] for name in ("mask_token_id", "target_layer_ids")}
    outer = {name: None for name in moved}
    without = {name: value for name, value in DSPARK.items() if name not in moved}
    draft = read_dspark(without | {"dflash_config": moved}, None, MINICPM, WISH)
    assert draft == read()
    with pytest.raises(ConfigError, match="mask_token_id: expected a value"):
        read(outer)


def test_the_tensors_are_compared_with_the_config(tmp_path):
    tensors = dspark_tensors()
    draft = opened(tmp_path, tensors)
    sources = {source.name: source.shape for spec in draft.specs for source in spec.sources}
    assert sources == {name: array.shape for name, array in tensors.items()}
    assert all(spec.name.startswith("draft.") for spec in draft.specs)
    for name in ("markov_head.markov_w1.weight", "fc.weight", "layers.1.self_attn.q_norm.weight"):
        with pytest.raises(CheckpointError, match=f"1 missing: '{name}'"):
            opened(tmp_path, {key: array for key, array in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match="1 unexpected: 'markov_head.gate.weight'"):
        opened(tmp_path, tensors | {"markov_head.gate.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match="1 wrong: 'markov_head.markov_w2.weight'"):
        opened(tmp_path, tensors | {"markov_head.markov_w2.weight": np.zeros((VOCAB, 5), np.float32)})


def test_an_embedding_and_a_head_that_come_along(tmp_path):
    """Drafts may bring both, as for Qwen3: copies of the target's are left out, another head is used, another
    embedding refused."""
    target, tensors = target_tensors(), dspark_tensors()
    embedding, head = target["model.embed_tokens.weight"], target["lm_head.weight"]
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    assert opened(tmp_path, tensors | copies).specs == opened(tmp_path, tensors).specs
    own = opened(tmp_path, tensors | copies | {"lm_head.weight": head + 1})
    assert own.specs[-1].name == "draft.lm_head" and own.specs[-1].shape == (VOCAB, HIDDEN)
    with pytest.raises(UnsupportedModelError, match="an embedding of its own: expected that of its target"):
        opened(tmp_path, tensors | copies | {"embed_tokens.weight": embedding + 1})


def test_without_a_confidence_head(tmp_path):
    bare = dspark_tensors(confidence=False)
    assert opened(tmp_path, bare).config.block == Block(5, 3, MARKOV_RANK, False)
    with pytest.raises(ConfigError, match="min_confidence needs a confidence head.*leave min_confidence out"):
        opened(tmp_path, bare, min_confidence=0.5)
    with pytest.raises(CheckpointError, match="2 missing: 'confidence_head.proj.weight'"):
        opened(tmp_path, bare, {"enable_confidence_head": True})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size of the draft is not the target's: expected 32, got 64"),
        ({"vocab_size": 30}, "vocab_size of the draft is not the target's: expected 24, got 30"),
        ({"num_target_layers": 4}, "num_target_layers of the draft is not the target's: expected 3, got 4"),
        ({"target_layer_ids": None}, r"target_layer_ids: expected a list of layers in \[0, 2\)"),
        ({"target_layer_ids": [0, 2]}, r"target_layer_ids: expected a list of layers in \[0, 2\), got \[0, 2\]"),
        ({"block_size": None}, "block_size: expected a value"),
        ({"block_size": 64}, r"block_size: expected an integer in \[1, 63\]"),
        ({"markov_rank": 0}, "markov_rank: expected an integer in"),
        ({"markov_rank": None}, "markov_rank: expected a value"),
        ({"mask_token_id": VOCAB}, r"mask_token_id: expected an integer in \[0, 23\]"),
        ({"rope_parameters": None}, "rope_parameters: expected the draft's own rotary embedding"),
        ({"num_hidden_layers": None}, "num_hidden_layers: expected a value"),
    ],
)
def test_what_is_missing_or_disagrees_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        read(change)


@pytest.mark.parametrize(
    "change",
    [
        {"markov_head_type": "gated"}, {"sample_from_anchor": False}, {"confidence_head_with_markov": False},
        {"attention_value_scale": 0.5}, {"draft_vocab_size": 20}, {"hidden_act": "gelu"},
        {"use_sliding_window": True}, {"layer_types": ["sliding_attention"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_variant_that_is_not_carried_out_is_refused_by_name(change):
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        read(change)


def test_the_method_is_seen_in_the_tensors_and_in_the_config(tmp_path):
    assert detect_method(dspark_tensors()) == "dspark"
    folder = write_folder(tmp_path, DSPARK, dspark_tensors())
    assert method_of(str(folder), tmp_path) == method_of(str(folder), tmp_path, weights=False) == "dspark"
    with pytest.raises(ConfigError, match="the draft: expected dspark, got eagle3; use method 'eagle3'"):
        read(tensors=eagle3_tensors())


def test_chains_are_as_long_as_the_block_at_most():
    lengths = {7: [7, 4, 2], 16: [16, 8, 4], 2: [2, 1], 1: [1]}
    for size, expected in lengths.items():
        chains = chains_of(DRAFT_METHODS["dspark"].shapes, Block(size, 0, 1, True))
        assert [shape.num_passes for shape in chains] == expected and all(shape.is_chain for shape in chains)
    beside = tuple(replace(shape, lookup_length=9) for shape in DRAFT_METHODS["dspark"].shapes)
    assert chains_of(beside, Block(3, 0, 1, True))[0] == TreeShape(3, 1, 4, 9)
    named = (TreeShape.chain(3), TreeShape.chain(5))
    assert chains_of(named, Block(5, 0, 1, True)) == named
    with pytest.raises(ConfigError, match="num_passes: expected at most 4, the draft's block_size, got 5"):
        chains_of(named, Block(4, 0, 1, True))


def test_everything_of_a_draft_is_in_the_plan(tmp_path):
    draft = opened(tmp_path, dspark_tensors(), head_bits=8)
    assert [shape.num_passes for shape in draft.shapes] == [5, 3, 2]
    plan = plan_model(MINICPM, EngineConfig(prefill_chunk=32), itemsize=2, max_context=200, draft=draft)
    shapes = {region.name: region.shape for region in plan.regions}
    assert shapes["hidden"] == (64 + 1, 2 * HIDDEN)
    assert shapes["draft.k_pages"] == (2, 4, 2, 64, 8)
    assert (shapes["draft.logits"], shapes["draft.states"]) == ((5, VOCAB), (5, HIDDEN))
    assert shapes["draft.markov_w1"] == shapes["draft.markov_w2"] == (VOCAB, MARKOV_RANK)
    assert shapes["draft.lm_head.codes"] == (VOCAB, HIDDEN)


def test_a_gpu_reads_the_markov_head_16_bytes_at_a_time(tmp_path):
    draft, device = opened(tmp_path, dspark_tensors()), known_device("sm_90")
    with pytest.raises(UnsupportedModelError, match="markov_rank of a DSpark draft on a GPU: expected a multiple of 8"):
        CudaTarget(device).needs(MINICPM, EngineConfig(), weight_specs(MINICPM, EngineConfig()), draft)
