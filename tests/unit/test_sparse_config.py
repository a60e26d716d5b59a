"""Sparse attention in config.json and in a user's settings: reading it, and its effect on plans and executors."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import CONFIG

from cpmrt.bench.shapes import shape_config
from cpmrt.bench.work import decode_bytes, prefill_flops
from cpmrt.cli.arguments import add_model_options, llm_arguments
from cpmrt.cli.main import main
from cpmrt.cli.parser import Parser, UsageError
from cpmrt.config import EngineConfig, ModelConfig, SparseConfig, with_sparse_setting
from cpmrt.errors import ConfigError, UnsupportedModelError
from cpmrt.models.planning import plan_model
from cpmrt.weights.model_folder import ModelFolder

OFFICIAL = {
    "kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64, "window_size": 2048, "topk": 64,
    "use_nope": False, "dense_len": 8192,
}  # fmt: skip


def read(**section: object) -> SparseConfig | None:
    return SparseConfig.from_hf({"sparse_config": section}, "config.json")


def test_the_official_settings_are_the_defaults():
    assert read(**OFFICIAL) == read() == SparseConfig()
    made = SparseConfig()
    assert (made.local_blocks, made.num_selected, made.num_scored) == (32, 96, 62)
    assert made.dense_context == 8191


def test_every_field_is_read():
    made = read(**OFFICIAL | {"init_blocks": 2, "window_size": 1000, "topk": 9, "use_nope": True, "dense_len": -1})
    assert made == SparseConfig(2, 1000, 9, -1, True)
    assert made is not None and (made.local_blocks, made.num_selected, made.num_scored) == (15, 24, 6)
    assert made.dense_context == 24 * 64


def test_without_a_section_there_is_none():
    assert SparseConfig.from_hf({}, "config.json") is None
    assert SparseConfig.from_hf({"sparse_config": None}, "config.json") is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"block_size": 128}, "sparse_config: block_size"),
        ({"kernel_size": 64}, "sparse_config: kernel_size"),
        ({"kernel_stride": 8}, "sparse_config: kernel_stride"),
        ({"topk": 1}, r"topk: expected at least init_blocks \+ 1 \(2\)"),
        ({"topk": 4, "init_blocks": 4}, r"topk: expected at least init_blocks \+ 1 \(5\)"),
        ({"topk": 0, "init_blocks": 0}, "topk"),
        ({"topk": 2.5}, "topk"),
        ({"topk": True}, "topk"),
        ({"init_blocks": -1}, "init_blocks"),
        ({"window_size": 63}, "window_size"),
        ({"dense_len": -2}, "dense_len"),
        ({"dense_len": "8192"}, "dense_len"),
        ({"use_nope": 1}, "use_nope"),
        ({"sparse_len": 1}, r"unknown field.*'sparse_len'.*sparse=\"off\""),
    ],
)
def test_what_is_refused_is_named(section, message):
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        read(**section)


def test_a_section_that_is_no_object():
    with pytest.raises(ConfigError, match="sparse_config: expected an object"):
        SparseConfig.from_hf({"sparse_config": [1]}, "config.json")


@given(
    init=st.integers(0, 4), window=st.integers(64, 400), free=st.integers(0, 4), dense_len=st.integers(-1, 900),
    num_tokens=st.integers(1, 1200),
)  # fmt: skip
def test_what_a_token_leaves_out(init, window, free, dense_len, num_tokens):
    config = SparseConfig(init, window, init + 1 + free, dense_len)
    num_blocks = -(-num_tokens // 64)
    assert config.leaves_out(num_tokens) == (num_tokens >= dense_len and num_blocks > config.topk + window // 64)
    if config.leaves_out(num_tokens):
        # The first, the local and the own block are disjoint, so the rest is always the same number.
        assert config.num_selected - init - config.local_blocks - 1 == config.num_scored
        assert num_blocks - 1 - config.local_blocks >= init


def test_the_setting_of_a_user():
    config = {"topic": 1, "sparse_config": OFFICIAL}
    assert with_sparse_setting(config, "auto") == config
    assert with_sparse_setting(config, "off") == {"topic": 1}
    changed = with_sparse_setting(config, {"topk": 8, "dense_len": -1})
    assert changed["sparse_config"] == OFFICIAL | {"topk": 8, "dense_len": -1}
    assert with_sparse_setting({}, {}) == {"sparse_config": {}}
    assert config["sparse_config"] is OFFICIAL


@pytest.mark.parametrize("setting", ["on", None, True, 3, ["topk"]])
def test_a_setting_that_is_none(setting):
    with pytest.raises(ConfigError, match="sparse: expected"):
        with_sparse_setting({}, setting)


def test_the_flags_of_cpm_cu():
    flags = {"sink_window_size": 1, "block_window_size": 8, "sparse_topk_k": 64, "sparse_switch": 0}
    flags["use_compress_lse"] = True
    made = ModelConfig.from_hf(with_sparse_setting(CONFIG, flags)).attention.sparse
    assert made == SparseConfig(init_blocks=1, window_size=512, topk=64, dense_len=0)
    assert made is not None and made.num_selected == 64 + 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"use_compress_lse": False}, "use_compress_lse"),
        ({"topk": 4, "sparse_topk_k": 4}, "topk once"),
        ({"block_window_size": "8"}, "window_size"),
        ({"sparse_topk": 4}, "unknown field"),
    ],
)
def test_flags_that_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(with_sparse_setting(CONFIG, flags))


def sparse_8b(**section: object) -> ModelConfig:
    return ModelConfig.from_hf(shape_config("minicpm4-8b") | {"sparse_config": OFFICIAL | section})


@pytest.mark.parametrize(("use_nope", "share"), [(False, 1 / 32 + 1 / 128), (True, 1 / 2 + 1 / 32 + 1 / 128)])
def test_the_plan_counts_compressed_keys(use_nope, share):
    """The plan has K1, a sixteenth of the keys, and K2, a sixty-fourth; keys before RoPE take as much as those after
    it."""
    parts = plan_model(sparse_8b(use_nope=use_nope), EngineConfig(), itemsize=2, max_context=131072).part_bytes
    assert parts["compressed keys"] == share * parts["KV pages"]


def test_a_context_in_which_nothing_is_left_out_is_planned_dense():
    for context, is_sparse in ((8191, False), (8192, True)):
        plan = plan_model(sparse_8b(), EngineConfig(), itemsize=2, max_context=context)
        assert ("compressed keys" in plan.part_bytes) == is_sparse
        assert any(region.name == "blocks" for region in plan.regions) == is_sparse
        assert (sparse_8b().for_context(context).attention.sparse is None) != is_sparse


def test_a_folder_is_opened_with_the_setting(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"sparse_config": OFFICIAL}))
    assert ModelFolder.open(tmp_path).config.attention.sparse == SparseConfig()
    assert ModelFolder.open(tmp_path, sparse="off").config.attention.sparse is None
    opened = ModelFolder.open(tmp_path, hf_overrides={"sparse_config": {"topk": 5}}, sparse={"dense_len": 0})
    assert opened.config.attention.sparse == SparseConfig(topk=5, dense_len=0)


@pytest.mark.parametrize(
    ("options", "setting"),
    [([], "auto"), (["--sparse", "off"], "off"), (["--sparse", '{"topk": 4}'], {"topk": 4}), (["--sparse", "{}"], {})],
)
def test_the_option(options, setting):
    parser = Parser()
    add_model_options(parser)
    assert llm_arguments(parser.parse_args(options))["sparse"] == setting


def test_an_option_that_is_no_setting():
    parser = Parser()
    add_model_options(parser)
    with pytest.raises(UsageError, match="--sparse"):
        parser.parse_args(["--sparse", "on"])


def test_the_plan_command_shows_them(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    section = json.dumps({"topk": 2, "window_size": 64, "dense_len": -1})
    assert main(["plan", str(tmp_path), "--sparse", section, "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["part_bytes"]
    assert parts["compressed keys"] == parts["KV pages"] * (1 / 32 + 1 / 128)
    assert main(["plan", str(tmp_path), "--sparse", '{"topk": 0}']) == 1
    assert "sparse_config: topk" in capsys.readouterr().err


def test_inspect_shows_them(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"sparse_config": OFFICIAL | {"topk": 40}}))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sparse"] == asdict(SparseConfig(topk=40))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "sparse.topk 40" in " ".join(capsys.readouterr().out.split())


def test_the_yardstick_of_a_sparse_step():
    """A sparse step at 128K reads 96 blocks of keys and values, not 2048, and compressed keys, a sixteenth and a
    sixty-fourth
    of the keys."""
    dense, sparse = ModelConfig.from_hf(shape_config("minicpm4-8b")), sparse_8b()
    context, per_token = 131072, 32768
    saved = decode_bytes(dense, context, 1, 2) - decode_bytes(sparse, context, 1, 2)
    assert saved == (context - 96 * 64) * per_token - (context // 16 + context // 64) * per_token // 2
    assert decode_bytes(dense, 8191, 3, 2) == decode_bytes(sparse, 8191, 3, 2)
    assert decode_bytes(sparse, context + 1, 1, 2) - decode_bytes(sparse, context, 1, 2) == -63 * per_token
    assert prefill_flops(dense, 8191) == prefill_flops(sparse, 8191)
    first, last = (prefill_flops(sparse, length) - prefill_flops(sparse, length - 1) for length in (1, context))
    assert last - first == 32 * 4096 * (4 * (96 * 64 - 1) + 2 * (context // 16 + context // 64))
