"""Drafts in 4 bits, under both name families and with fc in one piece or two, propose the trees of their formulas."""

from __future__ import annotations

import json
from math import sqrt

import numpy as np
import pytest
from draft_checkpoint import DSPARK, TARGET, write_folder
from reference.plain_eagle import PlainEagle2
from reference.test_draft_trees_of_models import SHAPE, check_trees
from reference.tiny_models import random_weights, unpacked
from speculation_steps import SETTINGS, generate, prefill

from cpmrt.config import EngineConfig, ModelConfig, SpeculationConfig, TreeShape
from cpmrt.executor import Speculate
from cpmrt.models.decoder import tensor_specs
from cpmrt.reference.assembly import open_executor
from cpmrt.tensor_spec import Packing, Source
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.quantised import dequantised_blocks

HIDDEN, INNER, Q, KV = 128, 256, 128, 64
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "dim_model_base": 32,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
DRAFT = TARGET | SIZES | {"num_hidden_layers": 1, "mup_denominator": 32, "quantization_config": GPTQ}
RANDOM = np.random.default_rng(17)


def packed(layout, module, rows, columns, size=1.0):
    """Return a module's packed tensors: random words, each of which is eight valid codes, and random scales."""
    words = {"gptq": (columns // 8, rows), "marlin": (columns // 16, 2 * rows)}[layout]
    scales = RANDOM.uniform(0.5, 1.5, (columns // 128, rows)) * size * 0.2 * columns**-0.5
    made = {
        f"{module}.qweight": RANDOM.integers(-(2**31), 2**31, words, np.int32),
        f"{module}.scales": scales.astype(np.float16),
    }
    if layout == "gptq":
        made[f"{module}.qzeros"] = np.full((columns // 128, rows // 8), 0x77777777, np.int32)
    return made


def plain_values(folder, layout, module, rows, columns):
    source = Source(module, (rows, columns), Packing(layout, 128, True, v1_zeros=True))
    with Checkpoint.open(folder) as checkpoint:
        return np.concatenate(list(dequantised_blocks(source, checkpoint)))


def layer_matrices(fused):
    if fused:
        return {"self_attn.qkv_proj": (Q + 2 * KV, HIDDEN), "mlp.gate_up_proj": (2 * INNER, HIDDEN)} | _SINGLE
    parts = {f"self_attn.{name}_proj": (rows, HIDDEN) for name, rows in (("q", Q), ("k", KV), ("v", KV))}
    return parts | {f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")} | _SINGLE


_SINGLE = {"self_attn.o_proj": (HIDDEN, Q), "mlp.down_proj": (HIDDEN, INNER)}


def norms(*names):
    return {f"{name}.weight": RANDOM.uniform(0.7, 1.3, HIDDEN).astype(np.float32) for name in names}


def opened(tmp_path, target, tensors, **wishes):
    write_folder(tmp_path / "target", TARGET | SIZES, target)
    write_folder(tmp_path / "draft", DRAFT, tensors)
    settings = EngineConfig(
        executor="reference", prefill_chunk=16, max_context=128, memory_budget=1 << 30,
        draft=str(tmp_path / "draft"), speculation=SpeculationConfig("eagle2", (SHAPE,), **wishes),
    )  # fmt: skip
    return open_executor(ModelFolder.open(tmp_path / "target"), settings)


@pytest.fixture
def target():
    return random_target()


def check(executor, target, tensors, stem, layer):
    plain = PlainEagle2(target, TARGET | SIZES, tensors, DRAFT, 128)
    plain.stem, plain.layers, plain.scale = stem, (layer,), 1.4 / sqrt(32)
    check_trees(executor, plain)


def test_gptq_under_vllm_names(tmp_path, target):
    layer = "model.eagle_layers.0"
    matrices = {f"{layer}.{name}": shape for name, shape in layer_matrices(fused=False).items()}
    matrices["model.fc"] = (HIDDEN, 2 * HIDDEN)
    tensors = norms(
        "model.input_norm1", "model.input_norm2", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
    )
    for module, shape in matrices.items():
        tensors |= packed("gptq", module, *shape)
    executor, plan = opened(tmp_path, target, tensors)
    quants = {spec.name: spec.quant for spec in plan.tensors if spec.name.startswith("draft.") and len(spec.shape) == 2}
    assert quants and all(quant is not None and quant.bits == 4 for quant in quants.values())
    values = {
        f"{module}.weight": plain_values(tmp_path / "draft", "gptq", module, *shape)
        for module, shape in matrices.items()
    }
    check(executor, target, tensors | values, "model.", layer)


def test_marlin_under_cpmcu_names_with_fc_in_two_halves(tmp_path, target):
    """fc.qweight may hold two matrices that are packed separately: the embedding's, then the hidden state's."""
    matrices = {f"layers.0.{name}": shape for name, shape in layer_matrices(fused=True).items()}
    tensors = norms("input_norm1", "input_norm2", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    for module, shape in matrices.items():
        tensors |= packed("marlin", module, *shape)
    halves = [packed("marlin", half, HIDDEN, HIDDEN) for half in ("fc1", "fc2")]
    for part in ("qweight", "scales"):
        tensors[f"fc.{part}"] = np.concatenate([halves[0][f"fc1.{part}"], halves[1][f"fc2.{part}"]], axis=1)
    executor, plan = opened(tmp_path, target, tensors)
    assert plan.region("draft.fc_halves.codes").shape == (2 * HIDDEN, HIDDEN // 2)
    apart = write_folder(tmp_path / "apart", {}, halves[0] | halves[1])
    fc = [plain_values(apart, "marlin", half, HIDDEN, HIDDEN) for half in ("fc1", "fc2")]
    values = {"fc.weight": np.concatenate(fc, axis=1)}
    found = {module: plain_values(tmp_path / "draft", "marlin", module, *shape) for module, shape in matrices.items()}
    q, k, v = np.split(found["layers.0.self_attn.qkv_proj"], [Q, Q + KV])
    gate, up = np.split(found["layers.0.mlp.gate_up_proj"], 2)
    for name, value in (("self_attn.q", q), ("self_attn.k", k), ("self_attn.v", v), ("mlp.gate", gate), ("mlp.up", up)):
        values[f"layers.0.{name}_proj.weight"] = value
    for name in _SINGLE:
        values[f"layers.0.{name}.weight"] = found[f"layers.0.{name}"]
    check(executor, target, tensors | values, "", "layers.0")


@pytest.mark.parametrize("layers", ["gptq", "rounded to 4", "rounded to 8"])
def test_dspark(tmp_path, layers):
    """A DSpark draft's layers and fc are GPTQ tensors or rounded at loading; its Markov head stays in 16 bits."""
    random = np.random.default_rng(5)
    matrices = {f"layers.0.{name}": shape for name, shape in layer_matrices(fused=False).items()}
    matrices["fc"] = (HIDDEN, 2 * HIDDEN)
    values = {
        f"{name}.weight": (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for name, shape in {**matrices, "markov_head.markov_w1": (24, 8), "markov_head.markov_w2": (24, 8)}.items()
    } | norms("hidden_norm", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    values |= {f"layers.0.self_attn.{part}_norm.weight": np.ones(64, np.float32) for part in "qk"}
    config = DSPARK | SIZES | {"num_hidden_layers": 1, "markov_rank": 8}
    stored, wishes = values, {"layer_bits": int(layers[-1])} if layers != "gptq" else {}
    if layers == "gptq":
        stored = {name: array for name, array in values.items() if name.removesuffix(".weight") not in matrices}
        for module, shape in matrices.items():
            stored |= packed("gptq", module, *shape)
        config |= {"quantization_config": GPTQ}
    write_folder(tmp_path / "target", TARGET | SIZES, random_target())
    write_folder(tmp_path / "draft", config, stored)
    for module, shape in matrices.items():
        if layers == "gptq":
            values[f"{module}.weight"] = plain_values(tmp_path / "draft", "gptq", module, *shape)
        else:
            values[f"{module}.weight"] = rounded(values[f"{module}.weight"], wishes["layer_bits"])
    write_folder(tmp_path / "plain", {key: config[key] for key in config if key != "quantization_config"}, values)
    found, plan = opened_dspark(tmp_path, "draft", **wishes)
    expected, _ = opened_dspark(tmp_path, "plain")
    held = {spec.name: spec.quant for spec in plan.tensors if spec.name.startswith("draft.") and len(spec.shape) == 2}
    bits = wishes.get("layer_bits", 4)
    assert {name for name, quant in held.items() if quant is None} == {"draft.markov_w1", "draft.markov_w2"}
    assert all(quant is None or quant.bits == bits for quant in held.values())
    drafts = [drafted_blocks(executor) for executor in (found, expected)]
    assert drafts[0] == drafts[1]
    np.testing.assert_allclose(found.array("draft.logits"), expected.array("draft.logits"), rtol=1e-3, atol=1e-4)


def rounded(values, bits):
    """Return values rounded to symmetric codes in groups of 128 columns, whose largest value has the outermost code."""
    largest = 2 ** (bits - 1) - 1
    groups = values.reshape(len(values), -1, 128)
    scales = np.abs(groups).max(axis=2, keepdims=True) / np.float32(largest)
    return (np.rint(groups / scales) * scales).reshape(values.shape).astype(np.float32)


def random_target():
    specs = tensor_specs(ModelConfig.from_hf(TARGET | SIZES))
    return unpacked(specs, random_weights(specs, 4))


def opened_dspark(tmp_path, name, **wishes):
    settings = EngineConfig(
        executor="reference", prefill_chunk=16, max_context=128, memory_budget=1 << 30, draft=str(tmp_path / name),
        speculation=SpeculationConfig("dspark", (TreeShape.chain(4),), **wishes),
    )  # fmt: skip
    return open_executor(ModelFolder.open(tmp_path / "target"), settings)


def drafted_blocks(executor):
    prompt = tuple(np.random.default_rng(1).integers(3, 24, 21).tolist())
    prefill(executor, 0, prompt, SETTINGS["greedy"], count=40)
    found = []
    for _ in range(8):
        found.append(executor.proposed(0, executor.limits.tree_shapes[0]).tokens.tolist())
        executor.submit(Speculate((0,))).wait()
    return found


def test_random_weights_need_a_config_only(tmp_path, target):
    """With random weights a draft needs nothing but its config.json, whose settings it follows."""
    write_folder(tmp_path / "target", TARGET | SIZES, target)
    write_folder(tmp_path / "draft", DRAFT, {})
    (tmp_path / "draft" / "model.safetensors").unlink()
    settings = EngineConfig(
        executor="reference", load_format="dummy", max_context=128, memory_budget=1 << 30,
        draft=str(tmp_path / "draft"), speculation=SpeculationConfig("eagle2", (SHAPE,), draft_vocab=9),
    )  # fmt: skip
    executor, plan = open_executor(ModelFolder.open(tmp_path / "target"), settings)
    assert plan.region("draft.lm_head").shape == (9, HIDDEN)
    assert plan.region("draft.fc.codes").shape == (HIDDEN, HIDDEN)
    assert executor.limits.tree_shapes == (SHAPE,)


@pytest.mark.parametrize(("target_bits", "draft_bits"), [(4, 16), (16, 4), (4, 4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_are_those_of_plain_decoding(tmp_path, target_bits, draft_bits, dtype):
    """Drafts and targets in 4 or 16 bits with random weights give plain decoding's tokens in all settings."""
    executors = []
    for folder, config, bits in (("target", TARGET | SIZES, target_bits), ("draft", DRAFT, draft_bits)):
        (tmp_path / folder).mkdir()
        settings = config | {"quantization_config": GPTQ if bits == 4 else None}
        (tmp_path / folder / "config.json").write_text(json.dumps(settings))
    for drafts in ({"draft": str(tmp_path / "draft"), "speculation": SpeculationConfig("eagle2", (SHAPE,))}, {}):
        settings = EngineConfig(
            executor="reference", load_format="dummy", dtype=dtype, prefill_chunk=16, max_context=128,
            memory_budget=1 << 30, **drafts,
        )  # fmt: skip
        executors.append(open_executor(ModelFolder.open(tmp_path / "target", weights=False), settings)[0])
    accepted = []
    for prompt in (tuple(RANDOM.integers(3, 24, count).tolist()) for count in (7, 40)):
        for name, sampling in SETTINGS.items():
            found, lengths = generate(executors[0], prompt, sampling, (0, "decode") if name == "sampled" else (0,))
            assert found == generate(executors[1], prompt, sampling)[0], name
            accepted += lengths
    assert np.mean(accepted) > 1.02, "no draft was ever accepted, so nothing was tested"
