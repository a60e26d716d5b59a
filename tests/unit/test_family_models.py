"""tools/demo_model/family.py: checkpoints of its networks give the same logits in cpmrt. Needs torch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tools/make_demo_model.py needs torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_model.export import write_checkpoint  # noqa: E402
from demo_model.family import CONFIGS  # noqa: E402
from demo_model.network import MiniCPM  # noqa: E402
from demo_model.short_run import BUNDLED  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from cpmrt import LLM  # noqa: E402

TOKENS = [1, *np.random.default_rng(3).integers(5, 4000, 150).tolist()]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_checkpoint_gives_the_same_logits_in_cpmrt(kind: str, tmp_path: Path) -> None:
    config = CONFIGS[kind]()
    torch.manual_seed(1)
    network = MiniCPM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED / "tokenizer.json").read_bytes())
    save_file(network.state_dict(), str(tmp_path / "weights.safetensors"))
    out = tmp_path / "out"
    write_checkpoint(tmp_path, out, config, torch.device("cpu"))
    network.load_state_dict({name: tensor.bfloat16().float() for name, tensor in network.state_dict().items()})
    with torch.no_grad():
        expected = torch.log_softmax(network(torch.tensor([TOKENS]))[0].double(), -1).numpy()
    with LLM(out, executor="reference", dtype="float32", max_context=256) as llm:
        found = llm.score(TOKENS)
    np.testing.assert_allclose(found, expected[np.arange(len(TOKENS) - 1), TOKENS[1:]], atol=1e-4)
