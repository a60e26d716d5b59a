"""tools/make_demo_model.py --long: its schedule, its losses, its positions, the folder that it writes."""
# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tools/make_demo_model.py needs torch")
pytest.importorskip("safetensors")
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import make_demo_model
from demo_model import long_model
from demo_model.long_model import LongPlan, LongTrainer, long_config, losses
from demo_model.network import MiniCPM, NetworkConfig
from demo_model.retrieval import RetrievalRows, Statements, spread_positions
from tokenizers import Tokenizer

from cpmrt import LLM

SMALL = NetworkConfig(
    vocab_size=40, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=512, dim_model_base=8,
)  # fmt: skip


def test_lengths_take_their_shares_and_the_rate_ends_at_nothing():
    plan = LongPlan(1, 1, stages=((8, 0.25), (16, 0.25), (32, 0.5)))
    assert [plan.length_at(progress) for progress in (0, 0.24, 0.26, 0.49, 0.51, 1)] == [8, 8, 16, 16, 32, 32]
    assert plan.learning_rate_at(0) == plan.learning_rate_at(1) == 0
    assert plan.learning_rate_at(plan.warm_up_end) == plan.learning_rate_at(plan.decay_start) == plan.learning_rate
    assert sum(share for _, share in LongPlan.stages) == pytest.approx(1)


def test_the_rotary_embedding_is_stretched_as_the_context_is():
    assert long_config().rope_factors[-1] == 16 * NetworkConfig().rope_factors[-1]
    assert long_config().max_position_embeddings == 16 * NetworkConfig().max_position_embeddings


def test_positions_in_order_change_nothing_and_others_do():
    torch.manual_seed(0)
    network, tokens = MiniCPM(SMALL), torch.randint(40, (2, 30))
    plain = network.hidden_states(tokens)
    assert torch.equal(network.hidden_states(tokens, torch.arange(30)), plain)
    spread = torch.from_numpy(spread_positions(30, 512, np.random.default_rng(0)))
    assert (network.hidden_states(tokens, spread) - plain).abs().max() > 1e-3


def test_losses_are_means_over_what_is_marked():
    torch.manual_seed(0)
    network, rng = MiniCPM(SMALL), np.random.default_rng(0)
    tokens = rng.integers(40, size=(2, 31))
    is_text, is_answer = rng.random((2, 30)) < 0.6, rng.random((2, 30)) < 0.2
    found = losses(network, RetrievalRows(tokens, is_text, is_answer), None)
    with torch.no_grad():
        log_probs = torch.log_softmax(network(torch.from_numpy(tokens[:, :-1])), -1).double().numpy()
    each = -np.take_along_axis(log_probs, tokens[:, 1:, None], 2)[:, :, 0]
    right = log_probs.argmax(-1) == tokens[:, 1:]
    expected = each[is_text].mean(), each[is_answer].mean(), right[is_answer].mean()
    assert [value.item() for value in found] == pytest.approx(expected, rel=1e-5)


def test_a_stage_or_the_long_model(monkeypatch, capsys):
    for arguments in ([], ["all", "--long", "out"]):
        monkeypatch.setattr(sys, "argv", ["make_demo_model.py", *arguments])
        with pytest.raises(SystemExit):
            make_demo_model.parse_arguments()
        assert "give a stage, --long OUT" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["make_demo_model.py", "--long", "out"])
    assert make_demo_model.parse_arguments().long == Path("out")


@pytest.mark.all
def test_the_folder_is_a_model_with_a_sparse_config(tmp_path, monkeypatch):
    text = np.random.default_rng(0).integers(261, 4096, size=3000).astype(np.uint16)
    monkeypatch.setattr(long_model, "_encoded", lambda work, tokenizer, stride: (text, text))
    monkeypatch.setattr(LongTrainer, "run", lambda self: self.step(0.5))
    monkeypatch.setattr(long_model, "MEASURED_ROWS", 1)
    plan = LongPlan(1, 1, tokens_per_step=256, stages=((128, 0.4), (256, 0.6)))
    long_model.make_long_model(tmp_path / "long", plan, torch.device("cpu"))
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    assert config["sparse_config"]["topk"] == 64 and config["max_position_embeddings"] == 256
    assert "| 256 | 1 |" in (tmp_path / "long" / "README.md").read_text()
    statements = Statements.of(Tokenizer.from_file(str(long_model.BUNDLED / "tokenizer.json")))
    question = statements.draw(1, np.random.default_rng(0))[0].tolist()
    with LLM(tmp_path / "long", executor="reference") as llm, LLM(executor="reference", max_context=256) as bundled:
        assert llm.config.attention.sparse is not None and llm.max_context == 256
        assert np.abs(llm.logits(question) - bundled.logits(question)).max() > 1e-3
