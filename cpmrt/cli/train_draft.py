"""Train an EAGLE-2, EAGLE-3 or DSpark draft of a Llama, MiniCPM or Qwen checkpoint on what it writes itself.

    cpmrt train-draft --model demo --method eagle2 --text code.jsonl --text chat.jsonl --out drafts
    cpmrt train-draft --model FOLDER --method eagle3 --text TEXT --draft-vocab 32000 --out drafts
    cpmrt train-draft --model FOLDER --method dspark --text TEXT --layers 5 --block-size 7 --out drafts

The target continues prompts out of the text files (.txt, .jsonl with "text", or folders of them; each --text gets an
equal share), and the draft learns its distributions. The result is written to OUT/METHOD and read back; its acceptance
is measured on the target's continuations of --held-out prompts and printed as a table. Needs torch, which nothing else
here does; a GPU for anything but the smallest target.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import cpmrt
from cpmrt.cli.option_values import integer
from cpmrt.errors import ConfigError
from cpmrt.installation import pip_install, reinstall

_SIZE = integer(1, 1 << 31)
_STEPS = integer(0, 1 << 31, "0 or a positive integer")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub id of the target; 'demo' is the bundled one")
    parser.add_argument("--method", choices=("eagle2", "eagle3", "dspark"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the draft goes to OUT/METHOD")
    parser.add_argument("--text", type=Path, action="append", default=[], help="prompts to train on; repeatable")
    parser.add_argument("--held-out", type=Path, action="append", help="prompts to measure on; repeatable")
    sizes = parser.add_argument_group("sizes of the draft (default: those of a layer of the target)")
    sizes.add_argument("--intermediate", type=_SIZE)
    sizes.add_argument("--heads", type=_SIZE)
    sizes.add_argument("--kv-heads", type=_SIZE)
    sizes.add_argument("--draft-vocab", type=_SIZE, help="eagle3: most frequent tokens that its head knows")
    sizes.add_argument("--taps", type=int, nargs=3, help="eagle3: layers whose inputs it reads")
    sizes.add_argument("--layers", type=_SIZE, default=5, help="dspark: layers of a block (default: %(default)s)")
    sizes.add_argument("--block-size", type=_SIZE, default=7, help="dspark: tokens of a block (default: %(default)s)")
    sizes.add_argument("--markov-rank", type=_SIZE, default=256, help="dspark: Markov head (default: %(default)s)")
    sizes.add_argument("--target-layers", type=int, nargs="+", help="dspark: layers whose outputs it reads")
    texts = parser.add_argument_group("generated text")
    texts.add_argument("--generated", type=Path, help="file to keep the rows in; read if it is there")
    texts.add_argument("--rows", type=_SIZE, default=4096, help="rows to train on (default: %(default)s)")
    texts.add_argument(
        "--rows-at-once", type=_SIZE, default=256, help="rows that are generated together (default: %(default)s)"
    )
    texts.add_argument("--length", type=_SIZE, default=512, help="tokens of a row (default: %(default)s)")
    texts.add_argument("--prompts", type=_SIZE, default=20000, help="prompts of each text (default: %(default)s)")
    texts.add_argument(
        "--prompt-length", type=_SIZE, default=32, help="tokens of a prompt, at most (default: %(default)s)"
    )
    texts.add_argument(
        "--greedy-share", type=float, default=0.25,
        help="of the rows; the others have T = 0.7 to 1 (default: %(default)s)",
    )  # fmt: skip
    training = parser.add_argument_group("training")
    training.add_argument("--minutes", type=float, default=60.0, help="most time to train (default: %(default)s)")
    training.add_argument(
        "--steps", type=_STEPS, default=1_000_000,
        help="0: only measure the draft in OUT/METHOD (default: %(default)s)",
    )  # fmt: skip
    training.add_argument("--resume", action="store_true", help="go on with the draft in OUT/METHOD, in its sizes")
    training.add_argument("--batch", type=_SIZE, default=16, help="rows of a step (default: %(default)s)")
    training.add_argument("--passes", type=_SIZE, help="drafted depths that are trained (default: 3)")
    training.add_argument("--learning-rate", type=float, help="at its highest (default: 0.01)")
    training.add_argument("--hidden-weight", type=float, help="eagle2: of the regression (default: 0.1)")
    training.add_argument("--blocks", type=_SIZE, help="dspark: blocks of a row that a step trains on (default: 32)")
    training.add_argument("--seed", type=int, default=1, help="of all random numbers (default: %(default)s)")
    training.add_argument(
        "--measured-rows", type=_SIZE, default=64,
        help="held-out rows of each text and temperature (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run tools/train_draft.py, which is outside the package as it needs torch. Raises ConfigError without torch."""
    folder = tools_folder()
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("cpmrt train-draft needs torch, which is not installed", fix=pip_install("torch"))
    sys.path.insert(0, str(folder))
    importlib.import_module("train_draft").run(args)
    return 0


def tools_folder() -> Path:
    """Return the folder that has train_draft.py: `tools` in the installed package, else in the checkout."""
    package = Path(cpmrt.__file__).parent
    for folder in (package / "tools", package.parent / "tools"):
        if (folder / "train_draft.py").is_file():
            return folder
    raise ConfigError(f"{package} lacks the program that trains drafts", fix=reinstall())
