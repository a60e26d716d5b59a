"""Quantises a whole checkpoint layer after layer: at most one layer's weights are in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.config.layers import ExpertsMlp, GroupedAttention
from cpmrt.dtypes import from_float32, to_float32
from cpmrt.errors import UnsupportedModelError, listed
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.rope import rope_table
from cpmrt.quantization.arrays import Xp, to_host
from cpmrt.quantization.calibration import InputSums
from cpmrt.quantization.decoder_layer import DecoderLayer
from cpmrt.quantization.file_writer import SafetensorsWriter, TensorPlan
from cpmrt.quantization.formats import CODES_A_WORD, check_format, packed, planned_tensors, quantization_config
from cpmrt.quantization.outputs import copy_companions, new_folder
from cpmrt.quantization.recipe import QuantisedLayer, Recipe, quantise_head, quantise_layer
from cpmrt.reference.ops import rms_norm
from cpmrt.tensor_spec import Source
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import SINGLE_NAME, Checkpoint
from cpmrt.weights.formats.gptq import HEAD
from cpmrt.weights.gguf.names import is_gguf
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.safetensors import FLOATS

Report = Callable[[str, QuantisedLayer], None]
"""A function called with the name and the result of each part of the model, a layer or the head, once it is written."""


class ModelQuantiser:
    """Quantises one model by one recipe into a format of `formats.FORMATS`, with the array module `xp`.

    Raises UnsupportedModelError or ConfigError where model, recipe and format do not go together.
    """

    def __init__(self, folder: ModelFolder, recipe: Recipe, file_format: str, xp: Xp):
        self.folder, self.recipe, self.file_format, self.xp = folder, recipe, file_format, xp
        self.config: ModelConfig = folder.config
        check_quantisable(folder)
        mixers = [layer.mixer for layer in self.config.layers]
        if not all(isinstance(mixer, GroupedAttention) and mixer.rope and not mixer.output_gate for mixer in mixers):
            raise UnsupportedModelError(
                f"{folder.path}: layers of this kind cannot be quantised here", expected="grouped attention with RoPE",
                fix="use a GPTQ, AWQ or compressed-tensors checkpoint of this model",
            )  # fmt: skip
        check_format(file_format, recipe)
        self._sources = {source.name: source for spec in tensor_specs(self.config) for source in spec.sources}
        if recipe.lm_head and self.config.tie_word_embeddings:
            raise UnsupportedModelError(
                f"{folder.path}: the head is the embedding, which stays in 16 bits",
                fix="leave --lm-head out, and run the result with lm_head_bits=4",
            )
        self._check_shapes()

    def write(self, out: Path, windows: Sequence[Sequence[int]], report: Report) -> None:
        """Write the quantised model to the folder `out`, which must not exist; nothing is left of it after an error.

        `windows` are the token ids of the calibration text, empty without calibration. Raises CheckpointError where
        the weights are not what config.json says, or not finite; ConfigError where `out` cannot be made.
        """
        with Checkpoint.open(self.folder.path) as checkpoint, new_folder(out) as partial:
            check(tensor_specs(self.config), checkpoint)
            copy_companions(self.folder.path, partial)
            with SafetensorsWriter(partial / SINGLE_NAME, self._plan(checkpoint)) as writer:
                self._write_tensors(checkpoint, writer, windows, report)
            self._write_configs(partial)

    def _write_tensors(
        self, checkpoint: Checkpoint, writer: SafetensorsWriter, windows: Sequence[Sequence[int]], report: Report
    ) -> None:
        streams = self._embedded(checkpoint, windows)
        # Without windows the layers are not run, and a RoPE table of one position is enough.
        length = max((len(window) for window in windows), default=1)
        rope = self.xp.asarray(rope_table(self.config, self.config.attention.head_dim, length, length))
        done = set()
        for index in range(self.config.num_layers):
            prefix = f"model.layers.{index}."
            layer = DecoderLayer(self.config, self._tensors(checkpoint, prefix), rope)
            result = quantise_layer(layer, streams, self.recipe)
            self._write_linears(writer, prefix, result)
            for name, values in layer.tensors.items():
                if name.removesuffix(".weight") not in result.linears:
                    stored = FLOATS[checkpoint.entries[prefix + name].dtype]
                    writer.write(prefix + name, from_float32(to_host(values), stored))
            done |= {prefix + name for name in layer.tensors}
            report(f"layer {index + 1} of {self.config.num_layers}", result)
        if self.recipe.lm_head:
            result = self._quantised_head(checkpoint, streams)
            self._write_linears(writer, "", result)
            report(HEAD, result)
            done.add(f"{HEAD}.weight")
        for name in self._sources.keys() - done:
            writer.write(name, checkpoint.view(name))

    def _write_linears(self, writer: SafetensorsWriter, prefix: str, result: QuantisedLayer) -> None:
        for linear, quantised in result.linears.items():
            for suffix, words in packed(self.file_format, quantised, self._bits(prefix + linear)).items():
                writer.write(f"{prefix}{linear}.{suffix}", words)

    def _quantised_head(self, checkpoint: Checkpoint, streams: list[Any]) -> QuantisedLayer:
        head = self._tensors(checkpoint, f"{HEAD}.")["weight"]
        norm = self._tensors(checkpoint, "model.norm.")["weight"]
        inputs = (rms_norm(stream, norm, self.config.rms_norm_eps) for stream in streams)
        sums = InputSums.over(inputs, self.recipe.skip_positions) if streams else None
        return quantise_head(head, sums, self.recipe)

    def _embedded(self, checkpoint: Checkpoint, windows: Sequence[Sequence[int]]) -> list[Any]:
        """Return the residual stream [T, C] of each window as it enters the first layer."""
        name = "model.embed_tokens.weight"
        stored, scale = FLOATS[checkpoint.entries[name].dtype], self.config.scale_emb
        table = checkpoint.view(name)
        return [self.xp.asarray(to_float32(table[list(window)], stored) * scale) for window in windows]

    def _tensors(self, checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
        """Read the tensors whose names begin with `prefix`: float32 on the device, by the rest of the name."""
        tensors = {}
        for name in self._sources:
            if name.startswith(prefix):
                stored = FLOATS[checkpoint.entries[name].dtype]
                tensors[name.removeprefix(prefix)] = self.xp.asarray(to_float32(checkpoint.view(name), stored))
        return tensors

    def _linears(self) -> Iterator[tuple[str, Source]]:
        """Yield the module name and the source of each matrix to quantise."""
        for spec in tensor_specs(self.config):
            if spec.product and (spec.product != "head" or self.recipe.lm_head):
                yield from ((source.name.removesuffix(".weight"), source) for source in spec.sources)

    def _plan(self, checkpoint: Checkpoint) -> dict[str, TensorPlan]:
        plan = {
            name: TensorPlan(checkpoint.entries[name].dtype, source.shape) for name, source in self._sources.items()
        }
        for name, source in self._linears():
            del plan[name + ".weight"]
            num_rows, num_columns = source.shape
            num_groups = num_columns // self.recipe.grid.group_of(num_columns)
            sizes = num_rows, num_columns, num_groups
            for suffix, tensor in planned_tensors(self.file_format, *sizes, bits=self._bits(name)).items():
                plan[f"{name}.{suffix}"] = tensor
        return plan

    def _bits(self, module: str) -> int:
        """Return the bits of a code of a quantised matrix."""
        return self.recipe.lm_head if module == HEAD else 4

    def _check_shapes(self) -> None:
        """Raise UnsupportedModelError unless every linear to quantise makes whole words of codes and whole groups."""
        if odd := self._odd_kinds(CODES_A_WORD, CODES_A_WORD):
            is_head = all(kind.startswith(HEAD) for kind in odd)
            raise UnsupportedModelError(
                f"{self.folder.path}: inputs and outputs of a quantised linear are whole words of codes",
                expected=f"multiples of {CODES_A_WORD}", actual=listed(odd),
                fix="leave --lm-head out" if is_head else "make a GGUF file: cpmrt convert MODEL OUT.gguf --type q8_0",
            )  # fmt: skip
        group = self.recipe.grid.group_size
        if group != -1 and (odd := self._odd_kinds(1, group)):
            fitting = [size for size in (128, 64, 32) if not self._odd_kinds(1, size)]
            raise UnsupportedModelError(
                f"{self.folder.path}: group size {group} does not divide the input features of "
                f"{len(odd)} kinds of linears",
                expected=f"multiples of {group}",
                actual=listed(odd),
                fix=f"use --group-size {' or '.join(map(str, [*fitting, -1]))}",
            )

    def _odd_kinds(self, row_step: int, column_step: int) -> list[str]:
        """Return the names (without their layers) and shapes of the linears that are no multiples of the steps."""
        odd = {
            f"{name.split('.', 3)[-1]} {list(source.shape)}": None
            for name, source in self._linears()
            if source.shape[0] % row_step or source.shape[1] % column_step
        }
        return list(odd)

    def _write_configs(self, folder: Path) -> None:
        section = quantization_config(self.file_format, self.recipe)
        config = {**self.folder.raw_config, "quantization_config": section}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if self.file_format != "awq":
            (folder / "quantize_config.json").write_text(json.dumps(section, indent=2) + "\n")


def check_quantisable(folder: ModelFolder) -> None:
    """Raise UnsupportedModelError unless the weights are 16-bit or float32 safetensors without experts."""
    if folder.config.quantization:
        raise UnsupportedModelError(f"{folder.path} is quantised already", expected="16-bit or float32 weights")
    if is_gguf(folder.path):
        raise UnsupportedModelError(
            f"{folder.path} is a GGUF file", expected="a folder of safetensors",
            fix="make one: cpmrt convert FILE FOLDER --to safetensors",
        )  # fmt: skip
    if any(isinstance(layer.mlp, ExpertsMlp) for layer in folder.config.layers):
        raise UnsupportedModelError(
            f"{folder.path}: mixture-of-experts layers cannot be quantised here", expected="gated mlps",
            fix="use a GPTQ, AWQ or compressed-tensors checkpoint of this model",
        )  # fmt: skip
