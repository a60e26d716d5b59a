"""tools/demo_model/ternary.py: the rule of its values, their gradient, and the saved weights. Needs torch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tools/make_demo_model.py needs torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_model.network import NetworkConfig, token_loss  # noqa: E402
from demo_model.ternary import TernaryProjection, saved_weights, ternary, ternary_network  # noqa: E402

from cpmrt.dtypes import DType  # noqa: E402
from cpmrt.quantization.ternary import ternary_values  # noqa: E402
from cpmrt.weights.ternary import is_ternary  # noqa: E402

CONFIG = NetworkConfig(vocab_size=64, num_hidden_layers=1)


@pytest.mark.parametrize("group_size", [32, 128])
def test_values_are_those_of_the_quantiser(group_size: int) -> None:
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32))
    expected = ternary_values(weight.numpy(), group_size, DType.BFLOAT16)
    np.testing.assert_array_equal(ternary(weight, group_size).numpy(), expected)


def test_the_gradient_passes_and_what_is_used_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    from demo_model import ternary as module
    from demo_model.network import MiniCPM

    monkeypatch.setattr(module, "NetworkConfig", lambda: CONFIG)
    torch.manual_seed(0)
    plain = MiniCPM(CONFIG)
    network = ternary_network(plain.state_dict(), 128)
    rows = torch.randint(0, 64, (2, 33))
    loss = token_loss(network, rows)
    loss.backward()
    projections = [module for module in network.modules() if isinstance(module, TernaryProjection)]
    assert len(projections) == 7 and all(layer.weight.grad.abs().sum() > 0 for layer in projections)
    saved = saved_weights(network)
    assert saved.keys() == plain.state_dict().keys()
    for name, values in saved.items():
        if values.dim() == 2:
            assert is_ternary(values.detach().bfloat16().float().numpy(), 128) == name.endswith("proj.weight"), name
    used = MiniCPM(CONFIG, torch.bfloat16)
    used.load_state_dict(saved)
    assert float(token_loss(used, rows)) == pytest.approx(float(loss), abs=1e-5)
