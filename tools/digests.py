"""Digests of what the executors compute: two trees, or two machines, agree to the bit where all their digests do.

    tools/digests.py --executor reference --write before.json
    tools/digests.py --executor reference --compare before.json
    tools/digests.py --executor cuda --only 8b --write 8b.json

A case is a model with settings. Its digest covers the logits of a prompt in chunks, the tokens and log-probabilities of
decode steps with few and with many rows, of prompts that reuse pages, and of speculative steps of every shape. Random
weights are drawn by tensor name, so the shapes need no files. All goes through `LLM` and the executor's contract.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cpmrt.bench.shapes import config_folder, draft_configs, gptq_config, shape_config  # noqa: E402
from cpmrt.config import SamplingParams  # noqa: E402
from cpmrt.executor import Admit, Decode, Executor, Prefill, Release, Speculate, StepResult  # noqa: E402
from cpmrt.llm import LLM  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, logprobs=5, max_new_tokens=1024)
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, logprobs=5)
TREES = {"shapes": [[2, 4, 12], [4, 10, 32], [3, 8, 64]]}
CHAINS = {"shapes": [[5, 1, 6], [3, 1, 4], [8, 1, 9]]}
SPECULATE = {"eagle2": TREES, "eagle3": TREES, "lookup": CHAINS}
SHORT_SPARSE = {"dense_len": 256, "topk": 8, "window_size": 128}
TINY: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 4096, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model with settings to digest.

    `shape` is a shape of the benchmark, "tiny", or "demo" (the bundled model); `settings` are arguments of `LLM`;
    `rows` are the numbers of rows of decode steps.
    """

    name: str
    shape: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight_bits: int = 16
    rows: tuple[int, ...] = (1,)
    prompt_tokens: int = 300
    steps: int = 8


def reference_cases() -> Iterator[Case]:
    """Yield the cases for the NumPy executor: small models."""
    for dtype in ("bfloat16", "float16"):
        yield Case(f"demo {dtype}", "demo", {"dtype": dtype, "max_sequences": 4}, rows=(1, 4), prompt_tokens=200)
        yield Case(f"tiny {dtype}", "tiny", {"dtype": dtype, "max_sequences": 12}, rows=(1, 8, 12))
        yield Case(f"tiny int4 {dtype}", "tiny", {"dtype": dtype, "max_sequences": 12}, 4, rows=(1, 12))
    for draft, trees in SPECULATE.items():
        yield Case(f"demo {draft}", "demo", {"draft": draft, "speculate": trees}, prompt_tokens=150, steps=4)
    yield Case("demo head 4", "demo", {"lm_head_bits": 4}, prompt_tokens=100)
    yield Case("tiny fp8", "tiny", {"kv_dtype": "fp8", "max_sequences": 4}, rows=(1, 4))
    yield Case("tiny sparse", "tiny", {"sparse": SHORT_SPARSE, "max_sequences": 4}, rows=(1, 4), prompt_tokens=700)
    nope = {**SHORT_SPARSE, "use_nope": True}
    yield Case("tiny sparse nope", "tiny", {"sparse": nope}, prompt_tokens=700)
    yield Case("demo sparse lookup", "demo", {"sparse": SHORT_SPARSE, "draft": "lookup", "speculate": CHAINS}, steps=4)
    yield Case("tiny chunk 64", "tiny", {"prefill_chunk": 64})


def cuda_cases() -> Iterator[Case]:
    """Yield the cases for the CUDA executor: the shapes of the speed tables, and the bundled model."""
    for dtype in ("bfloat16", "float16"):
        yield Case(f"demo {dtype}", "demo", {"dtype": dtype, "max_sequences": 12}, rows=(1, 8, 12), prompt_tokens=200)
    for draft, trees in SPECULATE.items():
        yield Case(f"demo {draft}", "demo", {"draft": draft, "speculate": trees}, prompt_tokens=200)
    yield Case("demo fp8", "demo", {"kv_dtype": "fp8", "max_sequences": 12}, rows=(1, 12), prompt_tokens=200)
    yield Case("demo loops", "demo", {"steps_per_launch": 4}, prompt_tokens=200)
    for shape in ("minicpm4-0.5b", "minicpm4-8b"):
        for bits, dtype in ((16, "bfloat16"), (16, "float16"), (4, "bfloat16"), (4, "float16")):
            label = f"{shape} {'int4 ' if bits == 4 else ''}{dtype}"
            settings = {"dtype": dtype, "max_sequences": 64, "max_context": 2048, "prefill_chunk": 1024}
            yield Case(label, shape, settings, bits, rows=(1, 8, 12, 32, 64), prompt_tokens=1500)
        for bits in (16, 4):
            label = f"{shape}{' int4' if bits == 4 else ''}"
            few = {"max_sequences": 12, "max_context": 4096, "prefill_chunk": 2048}
            sparse = {**few, "sparse": {"dense_len": 512, "topk": 12, "window_size": 256}}
            yield Case(f"{label} sparse", shape, sparse, bits, rows=(1, 12), prompt_tokens=3000)
            yield Case(f"{label} fp8", shape, {**few, "kv_dtype": "fp8"}, bits, rows=(1, 12), prompt_tokens=3000)
            for draft, trees in SPECULATE.items():
                drafted = {"max_context": 2048, "draft": draft, "speculate": trees}
                yield Case(f"{label} {draft}", shape, drafted, bits, prompt_tokens=600)
            drafted = {**sparse, "max_sequences": 1, "draft": "eagle2", "speculate": TREES}
            yield Case(f"{label} sparse eagle2", shape, drafted, bits, prompt_tokens=1500)
        yield Case(f"{shape} int4 head 4", shape, {"max_context": 2048, "lm_head_bits": 4}, 4)


def digest(case: Case, executor: str) -> str:
    """Return the digest of everything that the case computes."""
    sha = hashlib.sha256()
    with opened(case, executor) as llm:
        vocab, runner = llm.config.vocab_size, llm.executor
        rng = random.Random(case.name.encode())
        prompt = tuple(rng.randrange(3, vocab) for _ in range(case.prompt_tokens))
        for logits in runner.prompt_logits(0, prompt):
            sha.update(logits.tobytes())
        for count in case.rows:
            _hash_results(sha, decoded(runner, count, prompt, case.steps))
        if runner.limits.tree_shapes:
            _hash_results(sha, speculated(runner, prompt, case.steps))
        repeated = [*prompt[:200], *prompt[:40]]
        for params in (GREEDY, SAMPLED, GREEDY):  # the second and third reuse pages
            made = llm.generate(repeated, SamplingParams(max_new_tokens=12, temperature=params.temperature, seed=5))
            sha.update(repr(made.token_ids).encode())
    return sha.hexdigest()[:16]


def decoded(executor: Executor, count: int, prompt: Sequence[int], steps: int) -> Iterator[StepResult]:
    """Yield the results of `count` sequences that decode together, of different lengths, greedy and sampled."""
    slots = tuple(range(count))
    for slot in slots:
        params = GREEDY if slot % 2 == 0 else SAMPLED
        yield from _prefilled(executor, slot, prompt[: max(8, len(prompt) // (1 + slot % 5) - 3 * slot)], params)
    for _ in range(steps):
        yield executor.submit(Decode(slots)).wait()
    for slot in slots:
        executor.submit(Release(slot))


def speculated(executor: Executor, prompt: Sequence[int], steps: int) -> Iterator[StepResult]:
    """Yield the results of speculative steps of every shape and plain steps, of a greedy and a sampled sequence.

    The prompt repeats itself, so that lookup finds something."""
    short = tuple(prompt[:100]) * 2
    for params in (GREEDY, SAMPLED):
        yield from _prefilled(executor, 0, short, params)
        for step in range(steps):
            for shape in range(len(executor.limits.tree_shapes)):
                yield executor.submit(Speculate((0,), shape)).wait()
            if step % 2:
                yield executor.submit(Decode((0,))).wait()
        executor.submit(Release(0))


def _prefilled(executor: Executor, slot: int, prompt: Sequence[int], params: SamplingParams) -> Iterator[StepResult]:
    executor.submit(Admit(slot, params.with_defaults(), 1000 + slot, 1024, ()))
    chunk = executor.limits.prefill_chunk
    for start in range(0, len(prompt), chunk):
        tokens = tuple(prompt[start : start + chunk])
        yield executor.submit(Prefill(slot, tokens, start, start + len(tokens) == len(prompt))).wait()


def _hash_results(sha: Any, results: Iterable[StepResult]) -> None:
    for result in results:
        for slot in result.slots:
            entries = [(entry.token_id, entry.logprob, entry.top) for entry in slot.logprobs]
            sha.update(repr((slot.token_ids, entries)).encode())


@contextmanager
def opened(case: Case, executor: str) -> Iterator[LLM]:
    """Yield the case's model. The files that random weights need are in a temporary folder."""
    if case.shape == "demo":
        with LLM(executor=executor, **case.settings) as llm:
            yield llm
        return
    is_tiny = case.shape == "tiny"
    config = dict(TINY) if is_tiny else shape_config(case.shape)
    if case.weight_bits == 4:
        config["quantization_config"] = gptq_config()
    drafts = {} if is_tiny else draft_configs(case.shape)
    with (
        config_folder(config, drafts) as folder,
        LLM(folder, executor=executor, load_format="dummy", **case.settings) as llm,
    ):
        yield llm


def read_digests(text: str) -> dict[str, str]:
    """Return the digests in a file of --write. Raises ArgumentTypeError, so that a wrong file stops the run early."""
    try:
        digests = json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: expected a file that --write has written, got {error}") from error
    if not isinstance(digests, dict):
        raise argparse.ArgumentTypeError(f"{text}: expected a JSON object that --write has written")
    return digests


def main(arguments: Sequence[str]) -> int:
    """Compute, print, write and compare the digests. Return 1 if one differs or a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=("reference", "cuda"), required=True)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names it finds")
    parser.add_argument("--write", type=Path, metavar="FILE", help="add the digests to this JSON object")
    parser.add_argument("--compare", type=read_digests, metavar="FILE", help="with the digests written there")
    args = parser.parse_args(arguments)
    every = list(reference_cases() if args.executor == "reference" else cuda_cases())
    cases = [case for case in every if re.search(args.only, case.name)]
    if not cases:  # no case at all would count as equal
        parser.error(f"--only: {args.only!r} finds none of {', '.join(case.name for case in every)}")
    found: dict[str, str] = {}
    for case in cases:
        begun = time.monotonic()
        try:
            found[case.name] = digest(case, args.executor)
        except Exception as error:  # one case must not hide the others
            found[case.name] = f"FAILED {type(error).__name__}: {error}"
        print(f"{case.name:36s} {found[case.name]}  {time.monotonic() - begun:.1f} s", flush=True)
        if args.write:
            known = json.loads(args.write.read_text()) if args.write.exists() else {}
            args.write.write_text(json.dumps(known | found, indent=1))
    expected = found if args.compare is None else args.compare
    wrong = [name for name in found if found[name] != expected.get(name) or found[name].startswith("FAILED")]
    good = f"{len(found) - len(wrong)} {'done' if args.compare is None else 'equal'}"
    print(f"{len(found)} cases, {good}" + (f"; NOT: {', '.join(wrong)}" if wrong else ""))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
