"""Measures what each way of quantisation costs the bundled model, on text it was not trained on; prints a table.

    python tools/eval_quantized.py --work build/quality --out build/quality/table.md

Text for both is this Python's own standard library, offline: calibration on modules of the training set, evaluation on
modules that it left out. Every row is a checkpoint made by `cpmrt quantize` or `cpmrt convert` and read back from its
files.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from quantization.quality import HeldOut, Outcome, held_out_windows, measure, standard_library_texts  # noqa: E402

from cpmrt import LLM  # noqa: E402
from cpmrt.cli.main import main as cpmrt_main  # noqa: E402
from cpmrt.errors import ConfigError, CpmrtError  # noqa: E402
from cpmrt.quantization.gguf_conversion import FILE_TYPES, to_gguf  # noqa: E402
from cpmrt.weights.hub import BUNDLED  # noqa: E402
from cpmrt.weights.model_folder import ModelFolder  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    `options` are those of `cpmrt quantize` for the bundled checkpoint. If they are None the row is the checkpoint in
    `folder`, the bundled one as a GGUF file of type `gguf`, or the bundled one as it is.
    """

    label: str
    options: tuple[str, ...] | None
    head_bits: int | None = None
    kv_dtype: str = "auto"
    folder: Path | None = None
    gguf: str = ""


CALIBRATION = "calibration"
"""The folder of texts within the work folder."""
GPTQ = ("--method", "gptq")
ACT_ORDER = (*GPTQ, "--act-order")
VARIANTS = (
    Variant("16-bit (bf16)", None),
    Variant("RTN g128", ("--method", "rtn")),
    Variant("RTN g128, zero points", ("--method", "rtn", "--asymmetric")),
    Variant("GPTQ g128", GPTQ),
    Variant("GPTQ g128, act-order (g_idx)", ACT_ORDER),
    Variant("GPTQ g128, act-order, static groups", (*ACT_ORDER, "--static-groups")),
    Variant("GPTQ g128, zero points", (*GPTQ, "--asymmetric")),
    Variant("GPTQ g32", (*GPTQ, "--group-size", "32")),
    Variant("AWQ format, RTN", ("--method", "rtn", "--format", "awq")),
    Variant("AWQ format, AWQ scales", ("--method", "awq", "--format", "awq")),
    Variant("16-bit, int8 head", None, 8),
    Variant("16-bit, int4 head", None, 4),
    Variant("GPTQ g128, int8 head", GPTQ, 8),
    Variant("GPTQ g128, int4 head", GPTQ, 4),
    Variant("ternary g128, not trained for it", ("--method", "ternary")),
    Variant("16-bit, keys and values in fp8", None, kv_dtype="fp8"),
    Variant("GPTQ g128, keys and values in fp8", GPTQ, kv_dtype="fp8"),
    *(Variant(f"GGUF {kind.matrices}", None, gguf=name) for name, kind in FILE_TYPES.items() if name != "bf16"),
)


def main() -> int:
    """Runs the tool. Exit code: 0 done, 1 an error that a message explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/quality"), help="for the checkpoints; emptied first")
    parser.add_argument("--out", type=Path, help="also write the table there")
    parser.add_argument("--tokens", type=int, default=32768, help="held-out tokens")
    parser.add_argument("--window", type=int, default=1024, help="held-out tokens in one piece")
    parser.add_argument("--calibration-windows", type=int, default=128, help="of 512 tokens")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="also a row for this checkpoint")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with this in their name, and the first")
    parser.add_argument("--executor", choices=("auto", "cuda", "reference"), default="auto")
    options = parser.parse_args()
    try:
        text = "\n".join(report(options)) + "\n"
    except CpmrtError as error:
        print(f"eval_quantized.py: {error}", file=sys.stderr)
        return 1
    if options.out is not None:
        options.out.write_text(text)
    return 0


def report(options: argparse.Namespace) -> Iterator[str]:
    """Yields lines of Markdown and prints each as soon as it is known."""
    for line in _rows(options):
        print(line, flush=True)
        yield line


def empty(work: Path) -> None:
    """Removes what an earlier run left in its folder. Raises ConfigError for a folder with anything else in it."""
    if work.exists() and any(work.iterdir()) and not (work / CALIBRATION).is_dir():
        expected = f"a folder that is empty, absent or of an earlier run (with a folder {CALIBRATION})"
        raise ConfigError(f"--work {work}", expected=expected, actual="other files")
    shutil.rmtree(work, ignore_errors=True)


def _rows(options: argparse.Namespace) -> Iterator[str]:
    empty(options.work)
    calibration = options.work / CALIBRATION
    calibration.mkdir(parents=True)
    for name, text in standard_library_texts(held_out=False):
        (calibration / name.replace("/", ".")).write_text(text)
    held_out: HeldOut | None = None
    exact: Outcome | None = None
    others = [Variant(folder.name, None, folder=folder) for folder in options.folder]
    chosen = [variant for variant in VARIANTS[1:] if options.only in variant.label]
    for variant in (VARIANTS[0], *chosen, *others):
        begun = time.perf_counter()
        with _opened(variant, calibration, options) as llm:
            held_out = held_out or held_out_windows(llm, options.tokens, options.window)
            outcome = measure(llm, held_out, exact)
        if exact is None:
            exact = outcome
            yield (
                f"{held_out.num_predictions} tokens in windows of {options.window}, {held_out.provenance}; calibrated "
                f"on {options.calibration_windows} windows of 512 tokens of the others.\n\n"
                "| weights | bits a byte | above bf16 | perplexity | same greedy token | divergence, nats |\n"
                "|---|---|---|---|---|---|"
            )
        yield _row(variant, outcome, exact, held_out)
        print(f"{variant.label}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


def _opened(variant: Variant, calibration: Path, options: argparse.Namespace) -> LLM:
    """Opens the model of a row, after making its checkpoint if it is not there."""
    folder = variant.folder
    if variant.gguf:
        folder = options.work / f"{variant.gguf}.gguf"
        to_gguf(ModelFolder.open(BUNDLED), folder, variant.gguf)
    if variant.options is not None:
        folder = options.work / "-".join(part.strip("-") for part in variant.options)
        if not folder.exists():
            made = cpmrt_main(_command(folder, variant.options, calibration, options.calibration_windows))
            if made:
                raise SystemExit(made)
    settings = {"executor": options.executor, "max_context": options.window, "kv_dtype": variant.kv_dtype}
    return LLM(folder, lm_head_bits=variant.head_bits, **settings)


def _command(folder: Path, method: Sequence[str], calibration: Path, windows: int) -> list[str]:
    calibrated = ("--calibration", str(calibration), "--windows", str(windows), "--window", "512")
    text = () if {"rtn", "ternary"} & {*method} else calibrated
    return ["quantize", "demo", str(folder), *method, *text, "--quiet"]


def _row(variant: Variant, outcome: Outcome, exact: Outcome, held_out: HeldOut) -> str:
    extra, deviation = outcome.extra_bits(exact, held_out)
    above = "-" if outcome is exact else f"{extra:+.4f} ± {deviation:.4f}"
    agreement = "-" if outcome is exact else f"{100 * outcome.agreement(exact):.1f} %"
    bits = f"{outcome.bits_a_byte(held_out):.4f}"
    divergence = "-" if outcome is exact else f"{outcome.divergence():.4f}"
    return f"| {variant.label} | {bits} | {above} | {outcome.perplexity():.3f} | {agreement} | {divergence} |"


if __name__ == "__main__":
    sys.exit(main())
