"""Reading a draft's folder against its target: both families of tensor names, and every disagreement refused by
name."""

from __future__ import annotations

import json
from math import sqrt

import numpy as np
import pytest
from draft_checkpoint import (
    DRAFT,
    DSPARK,
    EAGLE3,
    HIDDEN,
    MARKOV_RANK,
    TARGET,
    VOCAB,
    dspark_tensors,
    eagle2_tensors,
    eagle3_tensors,
    target_tensors,
    write_folder,
)

from cpmrt.bench.shapes import shape_config
from cpmrt.config import EngineConfig, ModelConfig, SpeculationConfig, TreeShape
from cpmrt.config.draft import DraftConfig, detect_method
from cpmrt.config.eagle import read_eagle
from cpmrt.errors import CheckpointError, ConfigError, UnsupportedModelError
from cpmrt.models.draft import Draft, tensor_specs
from cpmrt.models.draft_weights import open_draft
from cpmrt.models.planning import plan_model, weight_specs
from cpmrt.weights.draft_folder import method_of, resolve
from cpmrt.weights.model_folder import ModelFolder

MINICPM = ModelConfig.from_hf(TARGET)
LLAMA_FIELDS = {k: v for k, v in TARGET.items() if k not in ("scale_emb", "scale_depth", "dim_model_base")}
LLAMA = ModelConfig.from_hf(LLAMA_FIELDS | {"architectures": ["LlamaForCausalLM"]})
SHAPE = TreeShape(2, 3, 8)


def read(config, tensors, method="eagle2", target=MINICPM, **wishes):
    shapes = None if tensors is None else {name: array.shape for name, array in tensors.items()}
    return read_eagle(config, shapes, target, SpeculationConfig(method, (SHAPE,), **wishes))


def sources(draft):
    return {source.name: source.shape for spec in tensor_specs(draft) for source in spec.sources}


def needed(tensors, *leftovers):
    return {name: array.shape for name, array in tensors.items() if name not in leftovers}


def test_eagle2_under_vllm_names():
    tensors = eagle2_tensors("vllm", layers=2)
    draft = read(DRAFT | {"num_hidden_layers": 2}, tensors)
    assert sources(draft) == needed(tensors, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    first = draft.layers_config.layers[0]
    assert (draft.has_input_norms, first.has_mixer_norm, draft.has_fc_bias) == (True, True, False)
    assert (draft.hidden_width, draft.taps, draft.draft_vocab) == (HIDDEN, (), VOCAB)


def test_eagle2_under_cpmcu_names():
    tensors = eagle2_tensors("cpmcu", bias=True)
    draft = read(DRAFT, tensors)
    assert sources(draft) == needed(tensors, "embed_tokens.weight")
    assert draft.has_fc_bias


def test_classic_eagle_has_no_norms_and_a_file_without_a_bias_gives_none():
    tensors = eagle2_tensors("cpmcu", norms=False)
    draft = read(LLAMA_FIELDS | {"num_hidden_layers": 1}, tensors, target=LLAMA)
    assert sources(draft) == needed(tensors, "embed_tokens.weight")
    first = draft.layers_config.layers[0]
    assert (draft.has_input_norms, first.has_mixer_norm, draft.has_fc_bias) == (False, False, False)
    assert draft.decoder.residual_scale == 1.0 and draft.decoder.logit_divisor == 1.0


def test_eagle3():
    tensors = eagle3_tensors()
    draft = read(EAGLE3, tensors, "eagle3")
    assert sources(draft) == needed(tensors, "d2t", "t2d")
    assert (draft.taps, draft.hidden_width, draft.draft_vocab) == ((0, 1, 2), 3 * HIDDEN, 18)
    assert (draft.decoder.residual_scale, draft.decoder.logit_divisor) == (1.0, 1.0)


def test_eagle3_taps_an_early_a_middle_and_a_late_layer():
    target = ModelConfig.from_hf(TARGET | {"num_hidden_layers": 32})
    silent = {key: value for key, value in EAGLE3.items() if "layer_ids" not in key}
    assert read(silent, eagle3_tensors(), "eagle3", target).taps == (2, 16, 29)
    nested = silent | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}
    assert read(nested, eagle3_tensors(), "eagle3", target).taps == (1, 5)
    with pytest.raises(ConfigError, match=r"a list of layers in \[0, 3\).*name the tapped layers"):
        read(silent | {"eagle_aux_hidden_state_layer_ids": [2, 3]}, eagle3_tensors(), "eagle3")


def test_eagle2_has_the_divisor_and_the_embedding_scale_of_the_target():
    """An EAGLE-2 draft without its own takes the target's logit divisor, as it uses the target's head, and its
    scale_emb."""
    draft = read({k: v for k, v in DRAFT.items() if k not in ("scale_emb", "dim_model_base")}, eagle2_tensors())
    assert (draft.decoder.logit_divisor, draft.decoder.scale_emb) == (HIDDEN / 16, 4.0)


@pytest.mark.parametrize(
    ("settings", "wish", "expected"),
    [
        ({}, "draft", 1.4 / sqrt(32)),
        ({"mup_denominator": 24}, "draft", 1.4 / sqrt(24)),
        ({"mup_denominator": None, "num_hidden_layers": 2}, "draft", 1.4 / sqrt(32)),
        ({}, "cpmcu", 1.4 / sqrt(3 + 1)),
        ({"scale_depth": None}, "cpmcu", 1.4 / sqrt(3 + 1)),
    ],
)
def test_the_residual_scale(settings, wish, expected):
    draft = read(DRAFT | settings, eagle2_tensors(layers=2), residual_scale=wish)
    assert draft.decoder.residual_scale == pytest.approx(expected)


def test_the_residual_scale_of_eagle3_depends_on_its_kind():
    scaled = EAGLE3 | {"scale_depth": 1.4, "mup_denominator": 32}
    assert read(scaled, eagle3_tensors(), "eagle3").decoder.residual_scale == 1.0
    minicpm = scaled | {"model_type": "minicpm"}
    assert read(minicpm, eagle3_tensors(), "eagle3").decoder.residual_scale == pytest.approx(1.4 / sqrt(32))


@pytest.mark.parametrize(
    ("settings", "method", "message"),
    [
        ({"hidden_size": 64}, "eagle2", r"hidden_size of the draft is not the target's: expected 32, got 64"),
        ({"vocab_size": 25}, "eagle2", r"vocab_size .* expected 24, got 25"),
        ({"scale_emb": 12}, "eagle2", r"scale_emb .* expected 4.0, got 12.0; correct scale_emb"),
        ({"dim_model_base": 256}, "eagle2", r"dim_model_base .* expected 16.0, got 256"),
        ({"scale_depth": None}, "eagle2", r"scale_depth: expected a value.*residual_scale to 'cpmcu'"),
        ({"hidden_size": None}, "eagle2", r"hidden_size: expected a value"),
        ({"num_hidden_layers": 2}, "eagle3", r"num_hidden_layers of an EAGLE-3 draft: expected 1, got 2"),
        ({"draft_vocab_size": 17}, "eagle3", r"draft_vocab_size: expected \[18\], as d2t, got 17"),
        ({"vocab_size": 30}, "eagle3", r"vocab_size .* expected 24, got 30"),
    ],
)
def test_a_disagreement_is_named(settings, method, message):
    config, tensors = (DRAFT, eagle2_tensors()) if method == "eagle2" else (EAGLE3, eagle3_tensors())
    with pytest.raises(ConfigError, match=message):
        read(config | settings, tensors, method)


def test_a_rotation_of_its_own_or_the_targets():
    long = {"rope_scaling": {
        "rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }}  # fmt: skip
    target = ModelConfig.from_hf(TARGET | long | {"max_position_embeddings": 4096})
    draft = read(EAGLE3, eagle3_tensors(), "eagle3", target)
    assert draft.decoder.rope == target.rope
    assert draft.decoder.max_position_embeddings == 4096
    assert read(EAGLE3 | {"rope_theta": 500.0}, eagle3_tensors(), "eagle3", target).decoder.rope.theta == 500.0
    with pytest.raises(ConfigError, match=r"head_dim .* expected 8, got 16; give the draft a rope_scaling"):
        read(EAGLE3 | {"head_dim": 16}, eagle3_tensors(), "eagle3", target)


@pytest.mark.parametrize(("config", "method"), [
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 18}, "eagle3"),
    ({"architectures": ["EagleMiniCPMForCausalLM"]}, "eagle2"), ({"architectures": ["LlamaForCausalLM"]}, "model"),
    ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "draft_vocab_size": 18}, "dspark"),
])  # fmt: skip
def test_without_weights_the_config_tells_the_method(tmp_path, config, method):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert method_of(str(tmp_path), tmp_path, weights=False) == method


def test_a_draft_of_another_method_or_none(tmp_path):
    for tensors, found in ((eagle2_tensors(), "eagle2"), (eagle3_tensors(), "eagle3"), (target_tensors(), "model")):
        assert detect_method(tensors) == found
        folder = write_folder(tmp_path / found, DRAFT, tensors)
        assert method_of(str(folder), tmp_path) == found
        wrong = "eagle3" if found != "eagle3" else "eagle2"
        with pytest.raises(ConfigError, match=f"the draft: expected {wrong}, got {found}; use method '{found}'"):
            read(DRAFT, tensors, wrong)


def test_tensors_that_make_no_draft():
    tensors = eagle2_tensors()
    with pytest.raises(CheckpointError, match="input_norm1 and input_norm2: expected both, or none"):
        read(DRAFT, {name: array for name, array in tensors.items() if "norm2" not in name})
    with pytest.raises(CheckpointError, match="no layers: expected .*eagle_layers.0 or .*layers.0"):
        read(DRAFT, {name: array for name, array in tensors.items() if "layers" not in name})
    offsets = {name: array for name, array in eagle3_tensors().items() if name != "d2t"}
    with pytest.raises(CheckpointError, match="no tensor d2t"):
        read(EAGLE3, offsets, "eagle3")


def test_a_draft_within_the_models_folder(tmp_path):
    target = write_folder(tmp_path / "target", TARGET, target_tensors())
    inner = write_folder(target / "eagle2", DRAFT, eagle2_tensors())
    assert resolve("eagle2", target) == inner
    with pytest.raises(CheckpointError, match="an existing folder or a hub id"):
        resolve("eagle4", target)


def opened(tmp_path, tensors, config=DRAFT, method="eagle2", target=TARGET, engine=None, shape=SHAPE, **wishes):
    folder = ModelFolder.open(write_folder(tmp_path / "target", target, target_tensors()))
    write_folder(tmp_path / "draft", config, tensors)
    settings = EngineConfig(
        draft=str(tmp_path / "draft"), speculation=SpeculationConfig(method, (shape,), **wishes), **engine or {}
    )
    with open_draft(folder, settings, weight_specs(folder.config, settings)) as (_, draft):
        return draft


@pytest.mark.parametrize("kind", ["missing", "unexpected", "wrong"])
def test_the_tensors_are_compared_with_the_config(tmp_path, kind):
    tensors = eagle2_tensors()
    if kind == "missing":
        del tensors["model.eagle_layers.0.mlp.up_proj.weight"]
    elif kind == "unexpected":
        tensors["model.eagle_layers.0.mlp.up_proj.bias"] = np.zeros(48, np.float32)
    else:
        tensors["model.input_norm1.weight"] = np.ones(31, np.float32)
    with pytest.raises(CheckpointError, match=f"1 {kind}"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.full(18, 7, np.int64), r"an integer in \[0, 24\), got 24"),
        (-np.arange(18), "some of them twice"),
        (np.zeros(18, np.float32), "expected a row of I32 or I64, got F32"),
    ],
)
def test_offsets_of_eagle3_must_lead_to_tokens(tmp_path, offsets, message):
    with pytest.raises(CheckpointError, match=f"d2t.*{message}"):
        opened(tmp_path, eagle3_tensors() | {"d2t": offsets}, EAGLE3, "eagle3")


@pytest.mark.parametrize(
    ("wish", "message"),
    [(12, "needs a list of frequent tokens.*got 5 tokens.*gen_fr_index"), (25, "at most 24, the vocabulary, got 25")],
)
def test_a_cut_vocabulary_needs_its_list(tmp_path, wish, message):
    tensors = eagle2_tensors("cpmcu") | {"token_id_remap": np.arange(5, dtype=np.int32)}
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, tensors, draft_vocab=wish)


def test_a_list_in_a_home_that_there_is_not(tmp_path):
    with pytest.raises(ConfigError, match="draft_vocab: expected a number.*, got '~nobody of this name/list.json'"):
        opened(tmp_path, eagle2_tensors("cpmcu"), draft_vocab="~nobody of this name/list.json")


def test_a_cut_vocabulary_with_fewer_tokens_than_candidates(tmp_path):
    tensors = eagle2_tensors("cpmcu") | {"token_id_remap": np.arange(2, dtype=np.int32)}
    with pytest.raises(ConfigError, match="top_k: expected at most the draft's 2 tokens, got 3"):
        opened(tmp_path, tensors)


def test_where_the_head_comes_from(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([4, 9, 6]))
    path = str(tmp_path / "list.json")
    assert opened(tmp_path, eagle2_tensors()).head is None
    cut = opened(tmp_path, eagle2_tensors(), draft_vocab=path)
    assert cut.token_map == (4, 9, 6) and cut.head.shape == (3, HIDDEN) and cut.head.quant is None
    assert (cut.head.name, cut.head.sources[0].name, cut.head.sources[0].rows) == (
        "draft.lm_head", "lm_head.weight", (4, 9, 6),
    )  # fmt: skip
    rounded = opened(tmp_path, eagle2_tensors(), head_bits=4)
    assert rounded.head.shape == (VOCAB, HIDDEN) and rounded.head.quant.bits == 4
    eight = {"lm_head_bits": 8}
    assert opened(tmp_path, eagle2_tensors(), head_bits=8, engine=eight).head is None
    assert opened(tmp_path, eagle2_tensors(), engine=eight).head is None
    assert opened(tmp_path, eagle2_tensors(), engine=eight, draft_vocab=path).head.quant.bits == 8
    block = opened(tmp_path, dspark_tensors(), DSPARK, "dspark", shape=TreeShape.chain(3), draft_vocab=path)
    second = next(spec for spec in block.specs if spec.name == "draft.markov_w2")
    first = next(spec for spec in block.specs if spec.name == "draft.markov_w1")
    assert block.vocab_size == 3 and block.head.shape == (3, HIDDEN) and block.head.sources[0].rows == (4, 9, 6)
    assert second.shape == (3, MARKOV_RANK) and second.sources[0].rows == (4, 9, 6)
    assert first.shape == (VOCAB, MARKOV_RANK) and first.sources[0].rows is None
    own = opened(tmp_path, eagle3_tensors(), EAGLE3, "eagle3", head_bits=8)
    assert own.head is None and own.specs[-1].name == "draft.lm_head" and own.specs[-1].quant.bits == 8


def test_a_model_with_another_vocabulary_is_refused(tmp_path):
    folder = ModelFolder.open(write_folder(tmp_path / "target", TARGET, target_tensors()))
    write_folder(tmp_path / "draft", TARGET | {"vocab_size": 30}, {})
    settings = EngineConfig(
        draft=str(tmp_path / "draft"), speculation=SpeculationConfig("model", (TreeShape.chain(3),))
    )
    with (
        pytest.raises(ConfigError, match="vocab_size of the draft is not the target's: expected 24, got 30"),
        open_draft(folder, settings, weight_specs(folder.config, settings)),
    ):
        pass


@pytest.mark.parametrize(("shape", "kinds"), [
    ("minicpm3-4b", "LatentAttention"), ("minicpm-sala-9b", "GroupedAttention, LightningAttention"),
])  # fmt: skip
def test_a_model_of_other_attention_is_refused_as_a_draft(shape, kinds):
    model = ModelConfig.from_hf(shape_config(shape))
    wish = SpeculationConfig("model", (TreeShape.chain(3),))
    message = f"M/config.json: a draft model must have grouped attention .*: got {kinds}.*; use another draft"
    with pytest.raises(UnsupportedModelError, match=message):
        DraftConfig.of_model(model, model, wish, "M/config.json")


def test_what_the_forward_does_not_do_is_refused():
    with pytest.raises(UnsupportedModelError, match="hidden_act"):
        read(DRAFT | {"hidden_act": "gelu"}, eagle2_tensors())
    with pytest.raises(UnsupportedModelError, match="norm_before_residual: expected false"):
        read(EAGLE3 | {"norm_before_residual": True}, eagle3_tensors(), "eagle3")


def test_everything_of_a_draft_is_in_the_plan(tmp_path):
    """The memory plan holds a draft's weights, KV pages, tables and workspace, and leaves the target's parts
    unchanged."""
    draft = opened(tmp_path, eagle3_tensors(), EAGLE3, "eagle3")
    settings = EngineConfig(max_sequences=2, prefill_chunk=32)
    plan = plan_model(MINICPM, settings, itemsize=2, max_context=200, draft=draft)
    without = plan_model(MINICPM, settings, itemsize=2, max_context=200)
    shapes = {region.name: region.shape for region in plan.regions}
    assert shapes["draft.k_pages"] == shapes["draft.v_pages"] == (1, 8, 2, 64, 8)
    assert shapes["draft.layers.0.qkv"] == (4 * 8 + 2 * 2 * 8, 2 * HIDDEN)
    assert shapes["hidden"] == (64 + 1, 3 * HIDDEN)
    assert (shapes["draft.rope"], shapes["draft.token_map"]) == ((2, 200, 4), (18,))
    assert (shapes["logits"], shapes["draft.logits"]) == ((8, VOCAB), (3, 18))
    parts, plain = plan.part_bytes, without.part_bytes
    assert parts["draft KV"] * 3 == parts["KV pages"] == plain["KV pages"]
    assert parts["layers"] == plain["layers"] and "draft" not in plain
    assert parts["draft"] >= 2 * sum(spec.num_elements for spec in draft.tensors)
    assert "draft KV" in str(plan)


def test_lookup_takes_no_memory_but_its_history():
    lookup = Draft(DraftConfig.lookup(), (TreeShape.chain(4),))
    plan = plan_model(MINICPM, EngineConfig(), itemsize=2, max_context=200, draft=lookup)
    assert not any(region.name.startswith("draft.") or region.name == "hidden" for region in plan.regions)
    assert plan.region("logits").shape == (5, VOCAB)
