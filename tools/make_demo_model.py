"""Trains the bundled demo model on permissively licensed text found on this machine.

    python tools/make_demo_model.py all --minutes 15 --work build/demo --out cpmrt/assets/demo
    python tools/make_demo_model.py --long build/long --minutes 2
    python tools/make_demo_model.py --ternary build/ternary --minutes 1.5
    python tools/make_demo_model.py --family latent build/latent --minutes 4

Stages, each reading what the one before left in the work folder: `corpus` collects sources and docstring
facts, `tokenizer` learns the vocabulary and encodes, `train` trains, `export` writes and measures the result.
`--long` instead continues the bundled model to contexts of 65,536 tokens and teaches it to find statements in them
(for tools/eval_sparse.py; not bundled), and `--ternary` continues it with ternary weights (for
tools/eval_quantized.py; not bundled). `--family` trains one of its size with latent attention, with lightning attention
in most layers (hybrid), or as it is (plain), for comparison; not bundled.
Needs torch, tokenizers, safetensors and NumPy; a GPU for anything but `--tiny`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from needed_packages import needing

with needing("torch", "tokenizers", "safetensors"):
    import torch
    from demo_model.conversations import training_conversations
    from demo_model.corpus import write_corpus
    from demo_model.docstring_facts import Fact, collect_facts
    from demo_model.evaluation import Evaluator
    from demo_model.export import check_folder_size, write_checkpoint, write_json, write_model_card
    from demo_model.family import CONFIGS, make_family_model
    from demo_model.long_model import long_plan, make_long_model
    from demo_model.network import NetworkConfig
    from demo_model.short_run import ShortPlan
    from demo_model.ternary import TernaryPlan, make_ternary_model
    from demo_model.tokenizer import check_round_trip, encode_file, tokenizer_sample, train_tokenizer
    from demo_model.training import Trainer, TrainingPlan
    from tokenizers import Tokenizer

PlanT = TypeVar("PlanT", bound=ShortPlan)
STAGES = ("corpus", "tokenizer", "train", "export")


def network_config(tiny: bool) -> NetworkConfig:
    """Return the demo model's sizes, or very small ones."""
    return NetworkConfig(vocab_size=1024, num_hidden_layers=2) if tiny else NetworkConfig()


def training_plan(arguments: argparse.Namespace) -> TrainingPlan:
    """Return the training run that the arguments ask for."""
    if arguments.tiny:
        return TrainingPlan(
            arguments.minutes, arguments.seed, tokens_per_step=2048, short_length=128, long_length=512,
            log_steps=5, evaluation_steps=10, evaluation_rows=16,
        )  # fmt: skip
    return TrainingPlan(arguments.minutes, arguments.seed, arguments.learning_rate or TrainingPlan.learning_rate)


def short_plan(kind: type[PlanT], arguments: argparse.Namespace) -> PlanT:
    """Return the run of a few minutes (--ternary, --family) that the arguments ask for."""
    rate = arguments.learning_rate or kind.learning_rate
    tokens = arguments.tokens_per_step or kind.tokens_per_step
    if arguments.tiny:
        return kind(
            arguments.minutes, arguments.seed, rate, tokens_per_step=1024, row_length=256, corpus_stride=200,
            evaluation_rows=4, log_seconds=1,
        )  # fmt: skip
    return kind(arguments.minutes, arguments.seed, rate, tokens_per_step=tokens)


def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_corpus(arguments: argparse.Namespace) -> None:
    """Make and write the source texts, the docstring facts and the conversations."""
    work: Path = arguments.work
    corpus = write_corpus(work, 40 if arguments.tiny else 1)
    write_json(work / "corpus.json", corpus)
    facts = collect_facts()[:: 40 if arguments.tiny else 1]
    write_json(work / "facts.json", {"facts": [asdict(fact) for fact in facts]})
    with open(work / "chat.jsonl", "w", encoding="utf-8") as chat:
        for text in training_conversations(facts, arguments.seed):
            chat.write(json.dumps({"text": text}) + "\n")
    print(f"corpus: {corpus['bytes']} bytes, {len(facts)} facts")


def make_tokenizer(arguments: argparse.Namespace) -> None:
    """Train and write the tokenizer, and write the token files."""
    work: Path = arguments.work
    vocab_size = network_config(arguments.tiny).vocab_size
    tokenizer = train_tokenizer(tokenizer_sample(work), vocab_size)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}: add text")
    check_round_trip(tokenizer, arguments.seed)
    tokenizer.save(str(work / "tokenizer.json"), pretty=False)
    sizes: dict[str, object] = {
        name: encode_file(tokenizer, work / f"{name}.jsonl", work / f"{name}.bin")
        for name in ("train", "heldout", "chat")
    }
    write_json(work / "encoded.json", sizes)
    print(f"tokenizer: {json.dumps(sizes)}")


def train(arguments: argparse.Namespace) -> None:
    """Train the network; writes its fp32 weights and a summary."""
    trainer = Trainer(network_config(arguments.tiny), training_plan(arguments), arguments.work, device())
    summary = trainer.run()
    run = {"date": datetime.date.today().isoformat(), "command": " ".join(["python", *sys.argv])}
    write_json(arguments.work / "summary.json", {**run, **summary})
    print(f"train: {json.dumps(summary)}")


def export(arguments: argparse.Namespace) -> None:
    """Write the checkpoint folder, measure it, and write its README with the results."""
    work: Path = arguments.work
    config, plan = network_config(arguments.tiny), training_plan(arguments)
    network = write_checkpoint(work, arguments.out, config, device())
    tokenizer = Tokenizer.from_file(str(arguments.out / "tokenizer.json"))
    facts = [Fact(**fact) for fact in json.loads((work / "facts.json").read_text())["facts"]]
    evaluator = Evaluator(network, tokenizer, work, arguments.seed)
    sampled = 20 if arguments.tiny else 1000
    results: dict[str, object] = {
        "held_out": evaluator.held_out((plan.short_length, plan.long_length)),
        "facts": len(facts),
        "facts_sampled": min(sampled, len(facts)),
        "exact_answers": evaluator.exact_answers(facts, sampled),
        "samples": evaluator.samples(),
    }
    write_json(work / "results.json", results)
    write_model_card(work, arguments.out, config)
    print(f"export: {check_folder_size(arguments.out)} bytes in {arguments.out}")


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("stage", choices=(*STAGES, "all"), nargs="?")
    parser.add_argument("--long", type=Path, metavar="OUT", help="make the long model in this folder, no stage")
    parser.add_argument("--ternary", type=Path, metavar="OUT", help="make the ternary model in this folder, no stage")
    parser.add_argument(
        "--family", nargs=2, metavar=("KIND", "OUT"),
        help=f"make a small model of this kind ({', '.join(CONFIGS)}) in this folder, no stage",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=15.0, help="training time, compilation not counted")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="intermediate files")
    parser.add_argument("--out", type=Path, default=Path("cpmrt/assets/demo"), help="the checkpoint")
    parser.add_argument("--learning-rate", type=float, help="at its highest")
    parser.add_argument("--tokens-per-step", type=int, help="of --ternary and --family, few where there is no GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: little text, two layers")
    arguments = parser.parse_args()
    wishes = (arguments.stage, arguments.long, arguments.ternary, arguments.family)
    if sum(wish is not None for wish in wishes) != 1:
        parser.error("give a stage, --long OUT, --ternary OUT or --family KIND OUT")
    if arguments.family and arguments.family[0] not in CONFIGS:
        parser.error(f"--family: expected {', '.join(CONFIGS)}, got {arguments.family[0]}")
    return arguments


def main() -> None:
    """Runs one stage, or all in order, or makes one of the other models."""
    arguments = parse_arguments()
    if arguments.long is not None:
        plan = long_plan(arguments.minutes, arguments.seed, arguments.learning_rate, arguments.tiny)
        make_long_model(arguments.long, plan, device())
        return
    if arguments.ternary is not None:
        make_ternary_model(arguments.ternary, short_plan(TernaryPlan, arguments), device())
        return
    if arguments.family is not None:
        kind, out = arguments.family
        make_family_model(kind, Path(out), short_plan(ShortPlan, arguments), device())
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    stages = {"corpus": make_corpus, "tokenizer": make_tokenizer, "train": train, "export": export}
    for name in STAGES if arguments.stage == "all" else (arguments.stage,):
        begun = time.perf_counter()
        stages[name](arguments)
        print(f"{name} took {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
