"""Converts a checkpoint of any format to safetensors that are not quantised, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cpmrt.config import EngineConfig
from cpmrt.config.text_part import without_quantization
from cpmrt.dtypes import DType
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.planning import weight_specs
from cpmrt.quantization.file_writer import SafetensorsWriter, TensorPlan
from cpmrt.quantization.outputs import copy_companions, new_folder
from cpmrt.tensor_spec import TensorSpec
from cpmrt.text.tokenizer import MAX_TOKENIZER_BYTES
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import SINGLE_NAME, Checkpoint
from cpmrt.weights.gguf.names import is_gguf
from cpmrt.weights.model_files import is_there, read_file
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import pack

_GGUF_COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""The files that a GGUF file stands for beside config.json and the weights."""


def to_safetensors(folder: ModelFolder, target: Path) -> None:
    """Make the folder `target`, which must not exist, with the weights in the config's dtype, or bfloat16 without one.

    Raises CheckpointError, ConfigError, UnsupportedModelError.
    """
    dtype = folder.config.dtype or DType.BFLOAT16
    with Checkpoint.open(folder.path) as checkpoint, new_folder(target) as partial:
        _copy_companions(folder.path, partial)
        sources = dict(plain_weights(folder, checkpoint))
        plans = {name: TensorPlan(dtype.safetensors_name, spec.shape) for name, spec in sources.items()}
        with SafetensorsWriter(partial / SINGLE_NAME, plans) as writer:
            for name, spec in sources.items():
                writer.write(name, pack(spec, checkpoint, dtype))
        config = without_quantization(folder.raw_config)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _copy_companions(source: Path, target: Path) -> None:
    if not is_gguf(source):
        copy_companions(source, target)
        return
    for name in _GGUF_COMPANIONS:
        if is_there(source / name):
            (target / name).write_bytes(read_file(source / name, MAX_TOKENIZER_BYTES))


def plain_weights(folder: ModelFolder, checkpoint: Checkpoint) -> Iterator[tuple[str, TensorSpec]]:
    """Yield every tensor of the model, whatever its format, by its Hugging Face name as a weight of one source.

    Raises CheckpointError; UnsupportedModelError where several matrices are stored as one.
    """
    plain = {spec.name: spec for spec in tensor_specs(folder.config)}
    stored = weight_specs(folder.config, EngineConfig(load_format="safetensors"), checkpoint)
    check(stored, checkpoint)
    for spec in stored:
        if spec.name not in plain:
            continue  # a head that is tied to the embedding
        plain_sources = plain[spec.name].sources
        if len(plain_sources) != len(spec.sources):
            raise UnsupportedModelError(
                f"{folder.path}: {spec.name} is stored as one matrix", expected="q, k, v, gate and up for themselves",
                fix="convert it first: cpmrt convert --to gptq",
            )  # fmt: skip
        for named, source in zip(plain_sources, spec.sources, strict=True):
            yield named.name, replace(spec, name=named.name, shape=source.shape, sources=(source,), quant=None)
