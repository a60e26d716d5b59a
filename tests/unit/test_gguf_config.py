"""Reading a config from the keys of a GGUF file: keys without a sensible value are errors, never crashes."""

import gguf_files as files
import gguf_models as models
import numpy as np
import pytest

from cpmrt import LLM
from cpmrt.config import EngineConfig
from cpmrt.errors import CheckpointError, ConfigError, CpmrtError, UnsupportedModelError
from cpmrt.models.planning import open_weights
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.gguf.config import MAX_FACTORS, _dtype
from cpmrt.weights.gguf.file import GgufFile, GgufModel
from cpmrt.weights.model_folder import ModelFolder

VALUES = [
    (files.U32, 0), (files.U32, 1), (files.U32, 3), (files.U32, 2**32 - 1), (files.I32, -1), (files.U64, 2**63),
    (files.F32, 0.5), (files.F32, float("nan")), (files.F32, float("inf")), (files.F64, 1e300), (files.BOOL, 1),
    (files.STRING, ""), (files.STRING, "x" * 5000), (files.STRING, "llama\n\x00"),
    (files.ARRAY, (files.U32, [])), (files.ARRAY, (files.U32, [4, 4])), (files.ARRAY, (files.U32, [4, 5])),
    (files.ARRAY, (files.F32, [float("nan")])), (files.ARRAY, (files.STRING, ["a", "a"])),
    (files.ARRAY, (files.BOOL, [1])),
]  # fmt: skip


MORE_KEYS = (
    "general.alignment", "minicpm.expert_count", "minicpm.rope.scaling.factor", "minicpm.rope.scaling.attn_factor",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.scores",
    "tokenizer.ggml.add_space_prefix", "tokenizer.huggingface.json", "tokenizer.chat_templates",
    "general.sampling.temp", "general.sampling.top_k", "split.no", "split.count",
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "dim_model_base": 16}
    return models.write_pair(folder, "minicpm", lambda name: "F32", **sizes).gguf


def changed(path, out, key=None, value=None, *, without=(), tensors=()):
    """Write the file again to `out` with a key replaced, keys left out, or tensors added, and return its path."""
    with GgufFile.open(path) as file:
        parts = []
        for name, entry in file.entries.items():
            if name not in without:
                number = 0 if entry.dtype == "F32" else 1
                parts.append(files.Described(name, entry.shape, number, file.view(name).tobytes()))
        keys = [(name, encoded(content)) for name, content in file.metadata.items() if name not in (key, *without)]
    if value is not None:
        keys.append((key, files.value(*value)))
    return files.Content(keys, [*parts, *tensors]).write(out)


def encoded(content):
    """Return the encoded value of a key as it was in the file, except for the width of numbers."""
    if isinstance(content, (bool, np.bool_)):
        return files.value(files.BOOL, content)
    if isinstance(content, int):
        return files.value(files.U32, content)
    if isinstance(content, float):
        return files.value(files.F32, content)
    if isinstance(content, str):
        return files.value(files.STRING, content)
    kind = files.STRING if isinstance(content, list) else files.I32
    return files.value(files.ARRAY, (kind, list(content)))


def opened(path):
    """Read everything that is read when a model is opened, and return its folder."""
    folder = ModelFolder.open(path)
    Tokenizer.open(path, vocab_size=folder.config.vocab_size)
    ChatTemplate.open(path)
    with Checkpoint.open(path):
        return folder


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.all) for first in range(1, 5))])
def test_any_value_of_any_key_is_read_or_refused_by_name(good, tmp_path, first):
    with GgufFile.open(good) as file:
        keys = [*file.metadata, *MORE_KEYS]
    loaded = 0
    for number, key in enumerate(keys):
        for kind, content in VALUES[(first + number) % 5 :: 5]:
            path = changed(good, tmp_path / "a.gguf", key, (kind, content))
            try:
                opened(path)
                loaded += 1
            except CpmrtError as error:
                assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 2000, (key, content)
    assert 10 < loaded < len(keys) * len(VALUES) / 10


KEYS = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length")


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_missing_is_named(good, tmp_path, key):
    with pytest.raises(CpmrtError, match=f"minicpm: {key}: expected a value, got nothing"):
        opened(changed(good, tmp_path / "a.gguf", without=(f"minicpm.{key}",)))


def test_an_architecture_that_is_not_supported_says_which_are(good, tmp_path):
    with pytest.raises(UnsupportedModelError, match="'gemma3' is not supported: expected one of llama, minicpm, "):
        opened(changed(good, tmp_path / "a.gguf", "general.architecture", (files.STRING, "gemma3")))
    with pytest.raises(CheckpointError, match="'general.architecture': expected a name, got None"):
        opened(changed(good, tmp_path / "a.gguf", without=("general.architecture",)))


def test_experts_are_refused(good, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"minicpm\.expert_count.*got 8"):
        opened(changed(good, tmp_path / "a.gguf", "minicpm.expert_count", (files.U32, 8)))


def test_scales_that_old_files_lack_are_those_of_the_first_models(good, tmp_path):
    keys = tuple(f"minicpm.{name}_scale" for name in ("embedding", "residual", "logit"))
    config = opened(changed(good, tmp_path / "a.gguf", without=keys)).config
    assert (config.scale_emb, config.residual_scale, config.logit_divisor) == (12.0, 1.4, 0.125)


def test_keys_that_a_file_may_lack(good, tmp_path):
    names = ("head_count_kv", "layer_norm_rms_epsilon", "key_length", "value_length")
    lacking = (*(f"minicpm.attention.{name}" for name in names), "minicpm.rope.freq_base")
    config = opened(changed(good, tmp_path / "a.gguf", without=lacking)).config
    assert (config.attention.num_heads, config.attention.num_kv_heads) == (2, 2)
    assert config.attention.head_dim == 128, "that of rope.dimension_count"
    assert (config.rms_norm_eps, config.rope.theta) == (1e-6, 10000.0)
    path = changed(good, tmp_path / "a.gguf", without=(*lacking, "minicpm.rope.dimension_count", *PLAIN))
    assert opened(path).config.attention.head_dim == 16, "embedding_length / head_count"


@pytest.mark.parametrize(("matrices", "vectors", "dtype"), [
    (["F32"], "F16", "float32"), (["F16"], "F32", "float16"), (["F16", "F32"], "F32", "float16"),
    (["BF16"], "F32", "bfloat16"), (["BF16", "F16"], "F32", "bfloat16"), (["Q8_0"], "F32", "bfloat16"),
    (["F16", "Q8_0"], "F32", "bfloat16"),
])  # fmt: skip
def test_the_type_of_activations_is_that_of_the_matrices(tmp_path, matrices, vectors, dtype):
    kinds = {"F32": (0, 4), "F16": (1, 2), "BF16": (30, 2), "Q8_0": (8, 34 / 32)}

    def tensor(name, shape, kind):
        number, width = kinds[kind]
        return files.Described(name, shape, number, bytes(int(np.prod(shape) * width)))

    tensors = [tensor(f"{number}.weight", (2, 32), kind) for number, kind in enumerate(matrices)]
    path = files.Content([], [*tensors, tensor("norm.weight", (32,), vectors)]).write(tmp_path / "a.gguf")
    with GgufModel.open(path) as model:
        assert _dtype(model) == dtype


def test_a_list_with_one_number_for_all_layers_is_that_number(good, tmp_path):
    value = files.ARRAY, (files.U32, [2, 2])
    path = changed(good, tmp_path / "a.gguf", "minicpm.attention.head_count_kv", value)
    assert opened(path).config.attention.num_kv_heads == 2


FACTORS = np.linspace(1, 8, 64, dtype=np.float32)
PLAIN = ("rope_factors_long.weight", "rope_factors_short.weight", "minicpm.rope.scaling.type")


def test_factors_of_llama_3_are_a_list_for_all_lengths(good, tmp_path):
    tensor = files.Described("rope_freqs.weight", (64,), 0, FACTORS.tobytes())
    rope = opened(changed(good, tmp_path / "a.gguf", without=PLAIN, tensors=[tensor])).config.rope
    assert rope.kind == "longrope" and rope.short_factor == rope.long_factor == tuple(FACTORS.tolist())
    assert rope.attention_factor == 1.0


def test_factors_that_would_fill_the_memory_are_refused_unread(good, tmp_path):
    tensor = files.Described("rope_freqs.weight", (MAX_FACTORS + 1,), 0, bytes(4 * MAX_FACTORS + 4))
    path = changed(good, tmp_path / "a.gguf", without=PLAIN, tensors=[tensor])
    with pytest.raises(UnsupportedModelError, match=rf"F32 of one dimension, .* got F32 \[{MAX_FACTORS + 1}\]"):
        opened(path)
    tensor = files.Described("rope_freqs.weight", (MAX_FACTORS,), 0, bytes(4 * MAX_FACTORS))
    with pytest.raises(ConfigError, match="short_factor"):
        opened(changed(good, tmp_path / "b.gguf", without=PLAIN, tensors=[tensor]))


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        ("none", {}, {"kind": "default"}),
        ("linear", {"factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ("linear", {"factor": 1.0}, {"kind": "default"}),
        ("yarn", {"factor": 1.0}, {"kind": "default"}),
        ("yarn", {"factor": 4.0}, {"kind": "yarn", "factor": 4.0, "original_max_positions": 256}),
        ("yarn", {"factor": 4.0, "attn_factor": 1.0}, {"attention_factor": 0.1 * np.log(4.0) + 1.0}),
        ("yarn", {"factor": 4.0, "yarn_beta_fast": 16.0}, {"beta_fast": 16.0, "beta_slow": 1.0}),
    ],
)
def test_rotary_scalings(good, tmp_path, kind, keys, expected):
    path = changed(good, tmp_path / "0.gguf", without=PLAIN)
    path = changed(path, tmp_path / "1.gguf", "minicpm.rope.scaling.type", (files.STRING, kind))
    for number, (key, value) in enumerate(keys.items(), 2):
        path = changed(path, tmp_path / f"{number}.gguf", f"minicpm.rope.scaling.{key}", (files.F32, value))
    rope = opened(path).config.rope
    assert {name: getattr(rope, name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("key", ["scale_linear", "scaling.factor"])
def test_a_factor_without_a_kind_is_linear(good, tmp_path, key):
    """A RoPE scaling factor without a kind, as in the first GGUF files, is linear scaling, as llama.cpp reads it."""
    path = changed(good, tmp_path / "a.gguf", f"minicpm.rope.{key}", (files.F32, 4.0), without=PLAIN)
    rope = opened(path).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_an_unknown_rotary_scaling_is_refused(good, tmp_path):
    path = changed(good, tmp_path / "0.gguf", "minicpm.rope.scaling.type", (files.STRING, "su"))
    path = changed(path, tmp_path / "1.gguf", "minicpm.rope.scaling.factor", (files.F32, 2.0), without=PLAIN[:2])
    with pytest.raises(UnsupportedModelError, match=r"minicpm: rope\.scaling\.type"):
        opened(path)


def test_sampling_and_ends(good, tmp_path):
    path = changed(good, tmp_path / "0.gguf", "general.sampling.temp", (files.F32, 0.7))
    path = changed(path, tmp_path / "1.gguf", "general.sampling.top_p", (files.F32, 0.95))
    path = changed(path, tmp_path / "2.gguf", "tokenizer.ggml.eot_token_id", (files.U32, 100))
    folder = opened(path)
    assert (folder.sampling.temperature, folder.sampling.top_p) == (0.7, 0.95)
    assert folder.config.eos_token_ids == (2, 100)


def test_a_control_token_that_ends_a_turn_is_an_end(good, tmp_path):
    with GgufFile.open(good) as file:
        tokens = list(file.metadata["tokenizer.ggml.tokens"])
        types = file.metadata["tokenizer.ggml.token_type"].tolist()
    tokens[40], types[40], tokens[41] = "<|im_end|>", 3, "<|endoftext|>"
    path = changed(good, tmp_path / "0.gguf", "tokenizer.ggml.tokens", (files.ARRAY, (files.STRING, tokens)))
    path = changed(path, tmp_path / "1.gguf", "tokenizer.ggml.token_type", (files.ARRAY, (files.I32, types)))
    assert opened(path).config.eos_token_ids == (2, 40)
    path = changed(path, tmp_path / "2.gguf", "tokenizer.ggml.eot_token_id", (files.U32, 40))
    assert opened(path).config.eos_token_ids == (2, 40), "each once"


@pytest.mark.parametrize("has_bias", [False, True])
def test_query_and_key_have_a_bias_where_the_file_has_one(tmp_path, has_bias):
    pair = models.write_pair(tmp_path, "llama", lambda name: "F32", num_hidden_layers=1, attention_bias=has_bias)
    (layer,) = opened(pair.gguf).config.layers
    assert layer.mixer.qkv_bias is has_bias
    with LLM(pair.gguf, executor="reference") as llm, LLM(pair.folder, executor="reference") as plain:
        np.testing.assert_allclose(llm.logits([3, 4, 5]), plain.logits([3, 4, 5]), rtol=1e-4, atol=1e-4)


def refusal(path):
    """Return the words with which the weights of a file are refused."""
    with pytest.raises(CheckpointError) as found, open_weights(ModelFolder.open(path), EngineConfig()):
        pass
    return str(found.value)


def test_tensors_that_are_missing_or_too_many_are_named(good, tmp_path):
    extra = files.Described("blk.0.attn_sinks.weight", (4,), 0, b"\0" * 16)
    said = refusal(changed(good, tmp_path / "a.gguf", without=("blk.0.attn_k.weight",), tensors=[extra]))
    assert "self_attn.k_proj.weight" in said and "blk.0.attn_sinks.weight" in said


def test_a_vector_in_blocks_is_named(good, tmp_path):
    norm = files.Described("blk.0.attn_norm.weight", (32,), 8, b"\0\x3c" + bytes(32))
    said = refusal(changed(good, tmp_path / "a.gguf", without=(norm.name,), tensors=[norm]))
    assert "1 wrong: 'model.layers.0.input_layernorm.weight' (expected F32 | F16 | BF16, got Q8_0)" in said


@pytest.mark.parametrize(("name", "other"), [
    ("blk.00.attn_norm.weight", "blk.0.attn_norm.weight"), ("model.norm.weight", "output_norm.weight"),
    ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
])  # fmt: skip
def test_two_names_of_one_tensor_are_refused(good, tmp_path, name, other):
    """A file must not hold a weight twice under two names, of which one would silently be left out."""
    twice = files.Described(name, (32,), 0, bytes(128))
    said = refusal(changed(good, tmp_path / "a.gguf", tensors=[twice]))
    assert said.endswith(f"got {other!r} and {name!r}") and "a.gguf: two tensors are 'model." in said
