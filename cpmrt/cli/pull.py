"""Download a model to its hub's cache, or what is missing there, and print its folder.

NAME is a Hugging Face id such as openbmb/MiniCPM4-0.5B, or modelscope:OpenBMB/MiniCPM4-0.5B. Config and tokenizer come
first: a model that cpmrt cannot run is refused before its weights are fetched. An interrupted download goes on where it
ended. HF_TOKEN, HF_ENDPOINT and HF_HOME are read, for ModelScope MODELSCOPE_API_TOKEN and MODELSCOPE_CACHE.
"""

from __future__ import annotations

import argparse
import os

from cpmrt import env
from cpmrt.cli.arguments import add_options
from cpmrt.cli.output import printable, write
from cpmrt.cli.parser import UsageError
from cpmrt.text import Tokenizer
from cpmrt.weights import hub
from cpmrt.weights.model_folder import ModelFolder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of a model on Hugging Face, or modelscope:NAME")
    add_options(parser, "--revision")
    parser.add_argument("--draft", action="store_true", help="NAME is a draft, which runs with another model only")


def run(args: argparse.Namespace) -> int:
    """Fetch what is missing. Raises CheckpointError, ConfigError, UnsupportedModelError."""
    if os.path.isdir(env.expanded(args.name)):
        raise UsageError(f"{printable(args.name)} is a folder of this machine: there is nothing to download")
    if args.name == hub.BUNDLED.name:
        raise UsageError(f"{args.name} is the bundled model: there is nothing to download")
    repository = hub.repository(args.name, args.revision)
    folder = repository.fetch_config()
    if not args.draft:
        config = ModelFolder.open(folder, weights=False).config
        Tokenizer.open(folder, vocab_size=config.vocab_size)
    repository.fetch_weights(folder)
    write(f"{folder}\n")
    return 0
