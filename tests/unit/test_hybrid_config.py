"""Models whose config.json lists the mixer of each layer: reading it, refusals by name, sizes and the memory plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpmrt.bench.shapes import gptq_config, shape_config
from cpmrt.bench.work import decode_bytes, prefill_flops
from cpmrt.config import EngineConfig, ModelConfig, TreeShape
from cpmrt.config.draft import DraftConfig
from cpmrt.config.layers import GroupedAttention, LightningAttention
from cpmrt.cuda.step.memory import certain_rows
from cpmrt.errors import ConfigError, UnsupportedModelError
from cpmrt.models.decoder import cache_layout, tensor_specs
from cpmrt.models.draft import Draft
from cpmrt.models.planning import plan_model, weight_specs

SALA = shape_config("minicpm-sala-9b")
CONFIG = ModelConfig.from_hf(SALA)
GIB, MIB = 1 << 30, 1 << 20


def read(**changes: object) -> ModelConfig:
    """Return the config of MiniCPM-SALA with keys changed; a value of `...` removes a key."""
    return ModelConfig.from_hf({key: value for key, value in (SALA | changes).items() if value is not ...})


def test_minicpm_sala():
    mixers = [layer.mixer for layer in CONFIG.layers]
    assert [number for number, mixer in enumerate(mixers) if isinstance(mixer, GroupedAttention)] == [
        0, 9, 16, 17, 22, 29, 30, 31,
    ]  # fmt: skip
    attention, lightning = CONFIG.of_kind(GroupedAttention), CONFIG.of_kind(LightningAttention)
    assert attention is not None and attention.sparse is not None and attention.output_gate and not attention.rope
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.qk_norm) == (32, 2, 128, False)
    assert lightning == LightningAttention(32, 128)
    assert sum(spec.num_elements for spec in tensor_specs(CONFIG)) == pytest.approx(9.48e9, rel=5e-4)
    by_type = {key: value for key, value in SALA.items() if key != "architectures"} | {"model_type": "minicpm_sala"}
    assert ModelConfig.from_hf(by_type) == CONFIG


def test_only_sequences_without_a_state_take_several_tokens_in_a_step():
    dense, engine = ModelConfig.from_hf(shape_config("minicpm4-8b")), EngineConfig(max_sequences=4)
    rows = [certain_rows(config, engine, cache_layout(config, 4096, 4)) for config in (CONFIG, dense)]
    assert rows[0] == 0 and rows[1] > engine.max_sequences


def test_slopes_are_those_of_alibi():
    assert LightningAttention(32, 128).slopes == pytest.approx([2 ** (-(head + 1) / 4) for head in range(32)])
    assert LightningAttention(1, 128).slopes == (2**-8,)
    assert LightningAttention(3, 64).slopes == (2**-4, 2**-8, 2**-2)
    assert LightningAttention(6, 64).slopes == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)


def test_every_flag_is_read():
    changed = read(
        qk_norm=False, attn_use_rope=True, attn_use_output_gate=False, lightning_use_rope=False, use_output_gate=False,
        use_output_norm=False, lightning_head_dim=64, lightning_nh=5, lightning_nkv=5, lightning_unheard_of=None,
        mixer_types=["lightning"] + ["minicpm4"] * 31,
    )  # fmt: skip
    plain = LightningAttention(5, 64, qk_norm=False, rope=False, output_norm=False, output_gate=False)
    assert changed.layers[0].mixer == plain
    attention = changed.of_kind(GroupedAttention)
    assert attention is not None and attention.rope and not attention.output_gate
    assert read(sparse_config=...).of_kind(GroupedAttention) == replace(CONFIG.of_kind(GroupedAttention), sparse=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lightning_unheard_of": 3}, "lightning_unheard_of is not known"),
        ({"attn_use_sinks": True}, "attn_use_sinks is not known"),
        ({"mixer_types": ["mamba"] * 32}, "mixer_types.*mamba"),
        ({"lightning_nkv": 8}, "lightning_nkv of lightning attention: expected 32, got 8"),
        ({"attention_bias": True}, "attention_bias of lightning attention: expected false, got true"),
        ({"lightning_scale": "1/d"}, r"lightning_scale: expected 1/sqrt\(d\)"),
        ({"lightning_head_dim": 64, "rope_scaling": {"type": "linear", "factor": 2.0}}, "beside a rope_scaling"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(**changes)


@pytest.mark.parametrize("changes", [
    {"mixer_types": ...}, {"mixer_types": ["minicpm4"]}, {"mixer_types": [{}, *["minicpm4"] * 31]},
    {"mixer_types": [["lightning"], *["lightning"] * 31]}, {"mixer_types": [None] * 32}, {"lightning_head_dim": 7},
])  # fmt: skip
def test_malformed_fields(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        read(**changes)


def test_a_million_tokens_are_planned():
    plan = plan_model(CONFIG, EngineConfig(), itemsize=2, max_context=1 << 20)
    parts = plan.part_bytes
    assert parts["KV pages"] == 8 * GIB and parts["states"] == 48 * MIB
    assert parts["snapshots"] == plan.caches.num_snapshots * 48 * MIB
    assert plan.kv_bytes_per_token == 8192


def test_a_chain_of_drafts_is_planned_and_trees_are_refused():
    chain = Draft(DraftConfig.lookup(), (TreeShape.chain(5), TreeShape.chain(3)))
    plan = plan_model(CONFIG, EngineConfig(), itemsize=2, max_context=4096, draft=chain)
    assert plan.region("lightning_chain").shape == (24, 6, 2 * 4096)
    tree = replace(chain, shapes=(TreeShape.chain(3), TreeShape(2, 10, 12)))
    with pytest.raises(ConfigError, match="draft trees.*lightning_states.*lookup"):
        plan_model(CONFIG, EngineConfig(), itemsize=2, max_context=4096, draft=tree)
    assert "lightning_chain" not in cache_layout(CONFIG, 4096, 1).specs


def test_the_work_of_a_step():
    """A step reads the weights once and the keys and values of eight layers, and reads and writes the other layers'
    states."""
    weights = sum(spec.num_bytes(2) for spec in weight_specs(CONFIG, EngineConfig()) if spec.name != "embed_tokens")
    assert decode_bytes(CONFIG, 1000, 2, 2) == weights + 2 * (1000 * 8192 + 2 * 48 * MIB)
    state = 24 * 4 * 4096 * 128
    token = prefill_flops(CONFIG, 100) - prefill_flops(CONFIG, 99) - 8 * 4 * 4096 * 100 - state
    matrices = (spec for spec in tensor_specs(CONFIG) if spec.product is not None and spec.part == "layers")
    assert token == 2 * sum(spec.num_elements for spec in matrices)


GATES = {"-:.*o_gate": {}, "-:.*z_proj": {}}, {r"-:.*self_attn\.o_gate$": {}, "-:.*z_proj.*": {}}


@pytest.mark.parametrize("rules", GATES)
def test_gates_stay_in_16_bits(rules):
    """GPTQModel's rules for output gates leave them in 16 bits; rules that are not plain names are not read."""
    others = {"-:.*layers[3]": {}, "+:.*down": {"bits": 4}}
    config = read(quantization_config=gptq_config() | {"dynamic": rules | others})
    held = {spec.name: spec.quant for spec in weight_specs(config, EngineConfig()) if spec.product is not None}
    in_16_bits = {name.split(".")[-1] for name, quant in held.items() if quant is None}
    assert in_16_bits == {"output_gate", "lm_head"} and sum(quant is None for quant in held.values()) == 33


def test_chunks_end_between_blocks():
    assert [CONFIG.chunk_of(tokens) for tokens in (64, 100, 512, 1000)] == [64, 64, 512, 960]
    with pytest.raises(ConfigError, match="prefill_chunk is too small.*at least 64, got 63"):
        CONFIG.chunk_of(63)
