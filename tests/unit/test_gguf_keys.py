"""Writing a model's config to the keys of a GGUF file, and refusing configs that the keys cannot express."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM
from cpmrt.config import SamplingDefaults
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.rope import rope_table
from cpmrt.quantization.gguf_conversion import to_gguf
from cpmrt.quantization.gguf_keys import model_keys
from cpmrt.weights.gguf.file import GgufModel
from cpmrt.weights.hugging_face import HuggingFace
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.repository import Repository


def made_of(folder, target=None):
    """Make a GGUF file in bfloat16 of a folder and return its path."""
    path = target or folder.with_name(f"{folder.name}.gguf")
    to_gguf(ModelFolder.open(folder), path, "bf16")
    return path


def test_a_file_has_the_name_of_the_model(tmp_path):
    folder = write_checkpoint(tmp_path / "MiniCPM4-0.5B")
    path = made_of(folder)
    again = made_of(path, tmp_path / "again.gguf")
    assert [name_in(path), name_in(again)] == ["MiniCPM4-0.5B"] * 2
    cached = replace(ModelFolder.open(folder), repository=Repository(HuggingFace(), "openbmb/MiniCPM4.1-8B"))
    assert model_keys(cached, 0)["general.name"] == "MiniCPM4.1-8B"


def name_in(path):
    with GgufModel.open(path) as model:
        return model.metadata["general.name"]


def test_value_heads_of_latent_attention_keep_their_size(tmp_path):
    """The value heads' size is kept even if it is not hidden_size / num_attention_heads, which is 16 here."""
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
    names = {"architectures": ["MiniCPM3ForCausalLM"], "num_key_value_heads": 4}
    folder = write_checkpoint(tmp_path / "folder", **names, **sizes)
    scores = []
    for path in (folder, made_of(folder)):
        with LLM(path, executor="reference", dtype="float32", max_context=64) as llm:
            scores.append(llm.score("a line of text"))
    np.testing.assert_allclose(*scores, rtol=0, atol=0.05)


@pytest.mark.parametrize("generation", [
    {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
    {"do_sample": True}, {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}, {"do_sample": False},
    {"top_k": 0}, {"eos_token_id": 2}, None,
])  # fmt: skip
def test_the_sampling_that_the_makers_recommend(tmp_path, generation):
    folder = write_checkpoint(tmp_path / "folder")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert ModelFolder.open(made_of(folder)).sampling == ModelFolder.open(folder).sampling


def test_a_model_that_is_known_by_its_sizes_keeps_the_sampling_of_its_card(tmp_path):
    """Sampling defaults from a model card are written to the file for programs that do not know the model."""
    folder = ModelFolder.open(write_checkpoint(tmp_path / "folder"))
    keys = model_keys(replace(folder, sampling=SamplingDefaults(0.8, top_p=0.8, source="a card")), 0)
    found = {key: value.value for key, value in keys.items() if key.startswith("general.sampling.")}
    assert found == {"general.sampling.temp": 0.8, "general.sampling.top_p": 0.8}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LISTS = {
    "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "factor": 2.0}, YARN, YARN | {"beta_fast": 16, "beta_slow": 2},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}, YARN | {"attention_factor": 1.5}, LISTS, LISTS | {"factor": 8.0},
    LISTS | {"attention_factor": 1.0}, LISTS | {"long_factor": [1.0] * 16, "list_by": "length"},
])  # fmt: skip
def test_a_rotary_embedding_turns_from_a_file_as_from_the_folder(tmp_path, rope):
    folder = write_checkpoint(tmp_path / "folder", rope_scaling=rope)
    expected, found = (ModelFolder.open(path).config for path in (folder, made_of(folder)))
    assert expected.max_positions == found.max_positions
    for limit in (512, 2048):
        np.testing.assert_allclose(rope_table(found, 32, 2048, limit), rope_table(expected, 32, 2048, limit), atol=2e-7)


def test_llama_cpp_is_told_the_weight_that_follows_from_the_lengths(tmp_path):
    """The attention factor that follows from the context lengths is written out, as llama.cpp would take 1 without
    it."""
    folder = ModelFolder.open(write_checkpoint(tmp_path / "folder", rope_scaling=LISTS))
    assert model_keys(folder, 0)["minicpm.rope.scaling.attn_factor"].value == pytest.approx(1.1**0.5)


@pytest.mark.parametrize(("rope", "words"), [
    ({"rope_type": "dynamic", "factor": 2.0}, "got dynamic"),
    (YARN | {"truncate": False}, "got yarn with truncate: false; use the safetensors"),
    (YARN | {"factor": None}, "got yarn without a factor above 1"),
    (LISTS | {"list_by": "length"}, 'got longrope with list_by: "length"'),
])  # fmt: skip
def test_a_rotary_embedding_without_keys_is_refused(tmp_path, rope, words):
    folder = ModelFolder.open(write_checkpoint(tmp_path / "folder", rope_scaling=rope))
    with pytest.raises(UnsupportedModelError, match=f"rotary embedding of a GGUF file: .* {words}"):
        to_gguf(folder, tmp_path / "a.gguf", "q8_0")
    assert not (tmp_path / "a.gguf").exists()
