"""Writes tests/golden: what Hugging Face transformers computes for tiny models and for the demo model, in fp32.

    python tools/make_golden.py tiny      the tiny random models and the rotary frequencies
    python tools/make_golden.py demo      the bundled demo model (cpmrt/assets/demo)
    python tools/make_golden.py quantised tiny quantised checkpoints of every format (tests/golden/quantised)
    python tools/make_golden.py sparse    tiny models with block-sparse attention (tests/golden/sparse)
    python tools/make_golden.py hybrid    tiny models with attention and lightning layers (tests/golden/hybrid)
    python tools/make_golden.py dspark    blocks of tiny DSpark drafts (tests/golden/dspark)

Needs torch and transformers. Running it again gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from needed_packages import needing

with needing("torch", "transformers"):
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from golden import dspark, hybrid, sparse  # noqa: E402
from golden.cases import CASES, NUM_NEW, NUM_PROMPT, Case  # noqa: E402
from golden.oracle import Oracle, hugging_face_config  # noqa: E402
from golden.quantised import golden_arrays  # noqa: E402
from reference.quantised_models import CASES as QUANTISED_CASES  # noqa: E402
from reference.quantised_models import QUANTISED_GOLDEN  # noqa: E402
from reference.tiny_models import GOLDEN, random_weights, unpacked  # noqa: E402

from cpmrt.config import ModelConfig, SpeculationConfig, TreeShape  # noqa: E402
from cpmrt.config.draft import DraftConfig  # noqa: E402
from cpmrt.config.dspark import read_dspark  # noqa: E402
from cpmrt.models.decoder import tensor_specs  # noqa: E402
from cpmrt.models.draft import tensor_specs as draft_tensor_specs  # noqa: E402

DEMO = ROOT / "cpmrt" / "assets" / "demo"
DEMO_PROMPTS = (
    "def read_lines(path):",
    "import os\n\n\nclass Cache:\n    def __init__(self, size):\n",
    "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n",
)
DEMO_NEW = 64
DEMO_LOGIT_POSITIONS = 4
MIN_MARGIN = 5e-3
MIN_CHOICE_GAP = 2e-5
SPARSE_LOGIT_POSITIONS = 40
MIN_DEMO_MARGIN = 2e-4
MIN_DISTINCT = 4
MAX_SEEDS = 100


def main() -> None:
    """Writes the golden files that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tiny", "demo", "quantised", "sparse", "hybrid", "dspark"))
    what = parser.parse_args().what
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    GOLDEN.mkdir(exist_ok=True)
    if what == "demo":
        write_demo()
        return
    if what in ("sparse", "hybrid"):
        (GOLDEN / what).mkdir(exist_ok=True)
        module, oracle = (sparse, sparse.SparseOracle) if what == "sparse" else (hybrid, hybrid.HybridOracle)
        for name, settings in module.CASES.items():
            write_long(what, name, settings, oracle, module.NUM_PROMPT, module.NUM_NEW)
        return
    if what == "dspark":
        (GOLDEN / what).mkdir(exist_ok=True)
        for name, (target, draft) in dspark.CASES.items():
            write_blocks(name, target, draft)
        return
    if what == "quantised":
        QUANTISED_GOLDEN.mkdir(exist_ok=True)
        for case in QUANTISED_CASES:
            write(f"quantised/{case.name}", "quantised", json.dumps(case.config), golden_arrays(case))
        return
    for case in CASES:
        write_tiny(case)
    write_rope_frequencies()


def write(name: str, command: str, config_text: str, arrays: dict[str, Any]) -> None:
    """Writes one npz; `config` and `metadata` are JSON texts. Its entries have no time stamps, so the bytes repeat."""
    metadata = {"command": f"python tools/make_golden.py {command}", **versions()}
    path = GOLDEN / f"{name}.npz"
    np.savez_compressed(path, config=np.array(config_text), metadata=np.array(json.dumps(metadata)), **arrays)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that were used."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def write_tiny(case: Case) -> None:
    """Writes all logits and the greedy tokens, for the first seed whose tokens rounding cannot change."""
    config = ModelConfig.from_hf(case.config)
    specs = tensor_specs(config)
    for seed in range(MAX_SEEDS):
        prompt = np.random.Generator(np.random.PCG64(seed)).integers(3, config.vocab_size, NUM_PROMPT).tolist()
        oracle = Oracle(case.config, unpacked(specs, random_weights(specs, seed)), case.max_context)
        greedy, margin = oracle.greedy(prompt, NUM_NEW)
        if margin > MIN_MARGIN and len(set(greedy)) >= MIN_DISTINCT:
            break
    else:
        raise SystemExit(f"{case.name}: no seed below {MAX_SEEDS} keeps a margin of {MIN_MARGIN}")
    arrays = {
        "seed": np.int64(seed),
        "max_context": np.int64(case.max_context or 0),
        "prompt_ids": np.array(prompt, np.int32),
        "greedy_ids": np.array(greedy, np.int32),
        "logits": oracle.logits(prompt + greedy),
        "margin": np.float32(margin),
    }
    write(case.name, "tiny", json.dumps(case.config), arrays)


def write_long(
    folder: str,
    name: str,
    settings: dict[str, Any],
    make_oracle: Callable[..., sparse.SparseOracle | hybrid.HybridOracle],
    num_prompt: int,
    num_new: int,
) -> None:
    """Writes some logits and the greedy tokens, for the first seed whose tokens and choices rounding cannot change."""
    config = ModelConfig.from_hf(settings)
    specs = tensor_specs(config)
    for seed in range(MAX_SEEDS):
        prompt = np.random.Generator(np.random.PCG64(seed)).integers(3, config.vocab_size, num_prompt).tolist()
        oracle = make_oracle(settings, unpacked(specs, random_weights(specs, seed)))
        oracle.logits(prompt)
        if oracle.gap < MIN_CHOICE_GAP:
            continue
        greedy, margin = oracle.greedy(prompt, num_new)
        if margin > MIN_MARGIN and oracle.gap > MIN_CHOICE_GAP and len(set(greedy)) >= MIN_DISTINCT:
            break
    else:
        raise SystemExit(f"{name}: no seed below {MAX_SEEDS} keeps its margins")
    logits = oracle.logits(prompt + greedy)
    positions = np.linspace(0, len(logits) - 1, SPARSE_LOGIT_POSITIONS).astype(np.int32)
    arrays = {
        "seed": np.int64(seed),
        "prompt_ids": np.array(prompt, np.int32),
        "greedy_ids": np.array(greedy, np.int32),
        "positions": positions,
        "logits": logits[positions],
        "margin": np.float32(margin),
        "gap": np.float32(oracle.gap),
    }
    write(f"{folder}/{name}", folder, json.dumps(settings), arrays)


def write_blocks(name: str, target: dict[str, Any], draft: dict[str, Any]) -> None:
    """Writes the block drafted after each greedy token, for the first seed whose tokens rounding cannot change."""
    config = ModelConfig.from_hf(target)
    specs, drafting = tensor_specs(config), draft_tensor_specs(dspark_config(draft, config))
    for seed in range(MAX_SEEDS):
        prompt = np.random.Generator(np.random.PCG64(seed)).integers(3, config.vocab_size, dspark.NUM_PROMPT).tolist()
        weights = unpacked(specs, random_weights(specs, seed))
        oracle = dspark.DSparkOracle(target, weights, draft, unpacked(drafting, random_weights(drafting, seed)))
        greedy, margin = oracle.greedy(prompt, dspark.NUM_NEW)
        if margin < MIN_MARGIN:
            continue
        blocks = [oracle.block(prompt + greedy[: count + 1]) for count in range(len(greedy))]
        margin = min(margin, *(block.margin for block in blocks))
        if margin > MIN_MARGIN:
            break
    else:
        raise SystemExit(f"{name}: no seed below {MAX_SEEDS} keeps a margin of {MIN_MARGIN}")
    arrays = {
        "draft_config": np.array(json.dumps(draft)),
        "seed": np.int64(seed),
        "prompt_ids": np.array(prompt, np.int32),
        "greedy_ids": np.array(greedy, np.int32),
        "drafts": np.array([block.tokens for block in blocks], np.int32),
        "confidences": np.array([block.confidences for block in blocks], np.float32),
        "logits": blocks[-1].logits,
        "margin": np.float32(margin),
    }
    write(f"dspark/{name}", "dspark", json.dumps(target), arrays)


def dspark_config(draft: dict[str, Any], target: ModelConfig) -> DraftConfig:
    """Returns the config of a DSpark draft as cpmrt reads it."""
    return read_dspark(draft, None, target, SpeculationConfig("dspark", (TreeShape.chain(1),)))


def write_rope_frequencies() -> None:
    """Writes rope.json: inverse frequencies and attention factor of every tiny config, short and long."""
    rows = []
    for case in CASES:
        config = hugging_face_config(case.config)
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            continue
        longest = 4 * config.max_position_embeddings if kind == "dynamic" else config.max_position_embeddings
        for limit in (32, longest):
            inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=limit)
            rows.append(
                {"config": case.config, "limit": limit, "inv_freq": inv_freq.tolist(), "attention_factor": factor}
            )
    path = GOLDEN / "rope.json"
    path.write_text(json.dumps({"metadata": versions(), "rows": rows}, indent=1) + "\n")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


def write_demo() -> None:
    """Writes demo.npz: greedy continuations of a few prompts, with the logits of the last positions."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    config = json.loads((DEMO / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    stored = load_file(DEMO / "model.safetensors")
    oracle = Oracle(config, {name: tensor.to(torch.float32).numpy() for name, tensor in stored.items()}, None)
    arrays: dict[str, Any] = {"num_prompts": np.int64(len(DEMO_PROMPTS))}
    for index, text in enumerate(DEMO_PROMPTS):
        prompt = [config["bos_token_id"], *tokenizer.encode(text, add_special_tokens=False).ids]
        greedy, margin = oracle.greedy(prompt, DEMO_NEW)
        logits = oracle.logits(prompt + greedy)
        positions = np.linspace(0, len(logits) - 1, DEMO_LOGIT_POSITIONS).astype(np.int32)
        arrays |= {
            f"prompt_ids_{index}": np.array(prompt, np.int32),
            f"greedy_ids_{index}": np.array(greedy, np.int32),
            f"positions_{index}": positions,
            f"logits_{index}": logits[positions],
            f"margin_{index}": np.float32(margin),
        }
        print(f"{text!r}: margin {margin:.2e}")
        if margin < MIN_DEMO_MARGIN:
            raise SystemExit(f"two tokens are all but equal on this path: replace the prompt {text!r}")
    write("demo", "demo", json.dumps(config), arrays)


if __name__ == "__main__":
    main()
