"""Rotary tables: transformers' inverse frequencies (stored, and live where it is installed) and float64 angles."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
from reference.tiny_models import GOLDEN, LLAMA

from cpmrt.config import ModelConfig
from cpmrt.models import rope

ROWS = json.loads((GOLDEN / "rope.json").read_text())["rows"]
FLOAT32_ROUNDING = 2e-6
"""Tolerance for transformers' frequencies, computed in float32 by a power, a product and a quotient."""


def scaled(**scaling):
    return ModelConfig.from_hf(LLAMA | {"max_position_embeddings": 8192, "rope_scaling": scaling})


def inverse_frequencies(config, limit):
    return rope.inverse_frequencies(config, config.attention.head_dim, limit)


def rope_table(config, num_positions, limit):
    return rope.rope_table(config, config.attention.head_dim, num_positions, limit)


def name_of(row):
    section = row["config"].get("rope_scaling") or row["config"]["rope_parameters"]
    return f"{section.get('rope_type', section.get('type'))}-{row['limit']}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_stored_frequencies_of_transformers(row):
    inv_freq, factor = inverse_frequencies(ModelConfig.from_hf(row["config"]), row["limit"])
    np.testing.assert_allclose(inv_freq, row["inv_freq"], rtol=FLOAT32_ROUNDING)
    assert factor == pytest.approx(row["attention_factor"], rel=1e-12)


def test_stored_frequencies_cover_every_kind_and_both_lists():
    names = {name_of(row) for row in ROWS}
    assert {name.split("-")[0] for name in names} >= {"linear", "dynamic", "llama3", "yarn", "longrope"}
    lists = [row["inv_freq"] for row in ROWS if name_of(row).startswith("longrope")]
    assert len({tuple(values) for values in lists}) == 2
    assert {row["attention_factor"] > 1 for row in ROWS if name_of(row).startswith("longrope")} == {True, False}


_LISTS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
LIVE = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 1.0},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 8, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "truncate": False},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, **_LISTS},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, "factor": 32.0, **_LISTS},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, "attention_factor": 1.5, **_LISTS},
    {"rope_type": "longrope", **_LISTS},
]  # fmt: skip


@pytest.mark.parametrize("limit", [64, 1024, 1025, 8192, 30000])
@pytest.mark.parametrize("scaling", LIVE, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_of_installed_transformers(scaling, limit):
    torch = pytest.importorskip("torch")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    from transformers import LlamaConfig

    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=8192, rope_scaling=dict(scaling)
    )
    expected, expected_factor = functions[scaling["rope_type"]](theirs, torch.device("cpu"), seq_len=limit)
    inv_freq, factor = inverse_frequencies(scaled(**scaling), limit)
    np.testing.assert_allclose(inv_freq, expected.numpy(), rtol=FLOAT32_ROUNDING)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_the_outer_original_range_wins_as_in_transformers():
    torch = pytest.importorskip("torch")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    from transformers import LlamaConfig

    changes = {"max_position_embeddings": 8192, "original_max_position_embeddings": 2048}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_scaling=dict(scaling), **changes)
    expected, _ = functions["yarn"](theirs, torch.device("cpu"))
    config = ModelConfig.from_hf(LLAMA | changes | {"rope_scaling": scaling})
    assert config.rope.original_max_positions == 2048
    np.testing.assert_allclose(inverse_frequencies(config, 8192)[0], expected.numpy(), rtol=FLOAT32_ROUNDING)


def test_rope_scaling_over_rope_parameters_extends_a_newer_checkpoint():
    """`rope_scaling` beside `rope_parameters`, as an override gives it, decides the scaling; the theta stays."""
    parameters = {"rope_type": "default", "rope_theta": 5e6}
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    rope = ModelConfig.from_hf(config | {"rope_parameters": parameters, "rope_scaling": scaling}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 5e6)


def test_dynamic_is_plain_within_the_native_range_only():
    plain, _ = inverse_frequencies(ModelConfig.from_hf(LLAMA), 64)
    config = scaled(type="dynamic", factor=4.0)
    assert np.array_equal(inverse_frequencies(config, 1)[0], plain)
    assert np.array_equal(inverse_frequencies(config, 8192)[0], plain)
    assert (inverse_frequencies(config, 8193)[0][1:] < plain[1:]).all()


def test_longrope_changes_lists_right_after_the_original_range():
    config = scaled(type="longrope", original_max_position_embeddings=1024, **_LISTS)
    plain, _ = inverse_frequencies(ModelConfig.from_hf(LLAMA), 64)
    np.testing.assert_allclose(plain / inverse_frequencies(config, 1024)[0], _LISTS["short_factor"])
    np.testing.assert_allclose(plain / inverse_frequencies(config, 1025)[0], _LISTS["long_factor"])


def test_longrope_by_length_rotates_each_position_by_the_list_of_its_length():
    """Each position is rotated by the list for a text that ends there, as transformers does while it decodes."""
    lists = {"type": "longrope", "original_max_position_embeddings": 1024, **_LISTS}
    by_length, by_context = scaled(**lists, list_by="length"), scaled(**lists)
    table = rope_table(by_length, 8192, 8192)
    for position in (0, 1, 1023, 1024, 5000, 8191):
        of_length = rope_table(by_context, position + 1, position + 1)
        assert np.array_equal(table[:, position], of_length[:, position])
    assert np.array_equal(table[:, :1024], rope_table(by_context, 1024, 1024))
    assert np.array_equal(rope_table(by_length, 500, 8192), table[:, :500])
    assert not np.array_equal(table[:, 5], rope_table(by_context, 8192, 8192)[:, 5])


@pytest.mark.parametrize("started", [0, 1])
def test_a_system_that_starts_no_more_threads_gives_the_same_table(monkeypatch, started):
    config, threads = ModelConfig.from_hf(LLAMA), iter(range(started))
    expected = rope_table(config, 8192, 8192)
    start = threading.Thread.start

    def refuse(thread):
        if next(threads, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert np.array_equal(rope_table(config, 8192, 8192), expected)


@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (5e6, 128), (1e6, 96)], ids=["1e4", "5e6", "1e6"])
def test_positions_to_131072(theta, head_dim):
    config = ModelConfig.from_hf(LLAMA | {"rope_theta": theta, "head_dim": head_dim, "max_position_embeddings": 131072})
    table = rope_table(config, 131072, 131072)
    assert table.dtype == np.float32
    assert table.shape == (2, 131072, head_dim // 2)
    positions = [0, 1, 2, 63, 64, 4095, 32768, 65537, 100003, 131070, 131071]
    for position in positions:
        for pair in range(head_dim // 2):
            angle = position * theta ** (-2 * pair / head_dim)
            assert abs(table[0, position, pair] - math.cos(angle)) < 1e-6
            assert abs(table[1, position, pair] - math.sin(angle)) < 1e-6
    assert np.abs(np.hypot(table[0], table[1]) - 1).max() < 1e-6


def test_a_shorter_table_is_the_start_of_a_longer_one():
    config = scaled(type="longrope", original_max_position_embeddings=1024, **_LISTS)
    assert np.array_equal(rope_table(config, 100, 8192), rope_table(config, 8192, 8192)[:, :100])


def test_the_attention_factor_scales_cos_and_sin():
    config = scaled(type="longrope", original_max_position_embeddings=1024, **_LISTS)
    expected = math.sqrt(1 + math.log(8) / math.log(1024))
    np.testing.assert_allclose(np.hypot(*rope_table(config, 50, 8192)), expected, rtol=1e-6)


def test_minicpm4_8b(shared_data):
    """MiniCPM4-8B's LongRoPE has one list and its original range: a fixed divisor per frequency, and factor 1."""
    text = json.loads((shared_data / "minicpm4_8b_config.json").read_text())
    config = ModelConfig.from_hf(text)
    for limit in (1, 32768):
        inv_freq, factor = inverse_frequencies(config, limit)
        divisors = np.array(text["rope_scaling"]["long_factor"])
        np.testing.assert_allclose(inv_freq, 10000.0 ** -(np.arange(64) / 64) / divisors, rtol=1e-12)
        assert factor == 1.0
    extended = ModelConfig.from_hf(text | {"max_position_embeddings": 131072})
    assert inverse_frequencies(extended, 131072)[1] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32768)))


def test_minicpm4_8b_in_transformers(shared_data):
    torch = pytest.importorskip("torch")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    from transformers import LlamaConfig

    text = json.loads((shared_data / "minicpm4_8b_config.json").read_text())
    keys = ("hidden_size", "num_attention_heads", "max_position_embeddings", "rope_theta", "rope_scaling")
    theirs = LlamaConfig(**{key: text[key] for key in keys})
    expected, _ = functions["longrope"](theirs, torch.device("cpu"), seq_len=32768)
    np.testing.assert_allclose(
        inverse_frequencies(ModelConfig.from_hf(text), 32768)[0], expected.numpy(), rtol=FLOAT32_ROUNDING
    )
