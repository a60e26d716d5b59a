"""A decoder of any layers: embedding, layers, final norm, head. One loop runs the layers of targets and of drafts.

What differs between families is data (`ModelConfig.layers` and its constants), never a branch on a name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.config.layers import LayerConfig, MixerConfig
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.layers import EMBED, HEAD, Names, Pass, StepBuffers, Table, Weights
from cpmrt.models.mixers import RESTORING, mixer_of
from cpmrt.models.mlps import mlp_of
from cpmrt.ops import Ops, Rows
from cpmrt.tensor_spec import BufferSpec, TensorSpec

Arrays = Mapping[str, Any]
_TOP = Names("", "")


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Return every weight, packed as the forward reads it, with the checkpoint tensors it is made of."""
    hidden, vocab = config.hidden_size, config.vocab_size
    specs = [replace(_TOP.weight("embed_tokens", "model.embed_tokens.weight", vocab, hidden), part="embedding")]
    for number, layer in enumerate(config.layers):
        specs.extend(layer_tensors(layer, config, Names(f"layers.{number}.", f"model.layers.{number}.")))
    specs.append(replace(_TOP.weight("norm", "model.norm.weight", hidden), part="embedding"))
    if not config.tie_word_embeddings:
        specs.append(replace(_TOP.weight("lm_head", "lm_head.weight", vocab, hidden, product="head"), part="lm head"))
    return tuple(specs)


def layer_tensors(layer: LayerConfig, config: ModelConfig, names: Names) -> Iterator[TensorSpec]:
    """Yield the weights of one layer."""
    yield from mixer_of(layer.mixer).tensors(layer, config, names)
    yield from mlp_of(layer.mlp).tensors(layer.mlp, config, names)


def cache_layout(
    config: ModelConfig,
    max_context: int,
    max_sequences: int,
    kv_dtype: str = "auto",
    prefix: str = "",
    chain_rows: int = 0,
) -> CacheLayout:
    """Return the caches of all layers; `kv_dtype` as in `EngineConfig`, `chain_rows` as in `CacheLayout`."""
    layers = (mixer_of(layer.mixer).caches(layer.mixer, kv_dtype) for layer in config.layers)
    return CacheLayout(tuple(layers), max_context, max_sequences, prefix, chain_rows)


def layer_buffers(config: ModelConfig, max_rows: int) -> tuple[BufferSpec, ...]:
    """Return the workspace of passes of at most `max_rows` rows through the layers, each buffer once."""
    found = {"x": BufferSpec("x", (max_rows, config.hidden_size), EMBED, HEAD)}
    for layer in config.layers:
        for spec in (
            *mixer_of(layer.mixer).buffers(layer.mixer, max_rows),
            *mlp_of(layer.mlp).buffers(layer.mlp, max_rows),
        ):
            known = found.setdefault(spec.name, spec)
            if spec.num_elements > known.num_elements:
                found[spec.name] = spec
    return tuple(found.values())


def buffer_specs(config: ModelConfig, max_rows: int, logit_rows: int) -> tuple[BufferSpec, ...]:
    """Return the workspace of a forward pass, of which `logit_rows` rows reach the head."""
    logits = BufferSpec("logits", (logit_rows, config.vocab_size), HEAD, HEAD, np.float32)
    return (*layer_buffers(config, max_rows), logits)


def tables(config: ModelConfig, max_context: int, limit: int) -> tuple[Table, ...]:
    """Return the tables, which are computed once. Layers share one by its name; `limit`: the context asked for."""
    found: dict[str, Table] = {}
    for layer in config.layers:
        for table in mixer_of(layer.mixer).tables(layer.mixer, config, max_context, limit):
            found.setdefault(table.spec.name, table)
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer with its weights and caches, bound by its mixer and its mlp."""

    config: LayerConfig
    mixer: Any
    mlp: Any
    ahead: Any
    """The next layer's fused q, k and v projection, its first weight; None where there is no such layer."""


@dataclass(frozen=True)
class BoundLayers:
    """The layers of a model on the arrays of an executor."""

    config: ModelConfig
    layers: tuple[BoundLayer, ...]
    row_names: frozenset[str]
    """Buffers that have a row for each row of a pass."""
    prefix: str = ""
    restoring: tuple[type[MixerConfig], ...] = ()
    """The kinds of mixers whose states take up accepted rows."""

    @classmethod
    def bind(cls, config: ModelConfig, arrays: Arrays, caches: CacheLayout, joined: Sequence[str] = ()) -> BoundLayers:
        """Find the weights and caches by name; those of a draft begin with `caches.prefix`. `joined` are further
        buffers that have a row for each row of a pass."""
        layers = []
        for number, layer in enumerate(config.layers):
            weights = Weights(arrays, f"{caches.prefix}layers.{number}.")
            mixer = mixer_of(layer.mixer).bind(layer, weights, caches.of_layer(number, arrays))
            ahead = Weights(arrays, f"{caches.prefix}layers.{number + 1}.")["qkv"]
            layers.append(BoundLayer(layer, mixer, mlp_of(layer.mlp).bind(layer.mlp, weights), ahead))
        row_names = frozenset(spec.name for spec in layer_buffers(config, 1)) | set(joined)
        restoring = (
            type(layer.mixer)
            for layer, specs in zip(config.layers, caches.layers, strict=True)
            if any(spec.on_accept == "restore" for spec in specs)
        )
        return cls(config, tuple(layers), row_names, caches.prefix, tuple(dict.fromkeys(restoring)))

    def of_each_kind(self) -> BoundLayers:
        """Return the first layer of each kind: layers that differ only in the contents of their arrays launch the same
        kernels. A layer may fetch a weight of the next one, so each is followed by a layer of the kind that follows it
        in the model, and the model's last kind comes last."""
        layers, first = self.layers, dict[Hashable, int]()
        for number, layer in enumerate(layers):
            first.setdefault(_kind(layer), number)
        numbers = sorted(first.values())
        for number, other in zip(tuple(numbers), (*numbers[1:], None), strict=True):
            follows = layers[number + 1 : number + 2]
            if follows and (other is None or _kind(follows[0].mixer) != _kind(layers[other].mixer)):
                numbers.append(number + 1)
        if _kind(layers[max(numbers)]) != _kind(layers[-1]):
            numbers.append(len(layers) - 1)
        return replace(self, layers=tuple(layers[number] for number in sorted(set(numbers))))

    def buffers(self, arrays: Arrays, num_rows: int) -> StepBuffers:
        """Return the workspace of a pass of `num_rows` rows."""
        return StepBuffers(arrays, self.row_names, num_rows, self.prefix)

    def run(self, ops: Ops, x: Any, rows: Rows, buffers: StepBuffers, hidden: Any, taps: tuple[int, ...]) -> None:
        """Run the rows x through every layer, in place; the inputs of the layers `taps` go side by side to `hidden`."""
        step = Pass(ops, x, rows, buffers, self.config.rms_norm_eps, self.config.residual_scale)
        for number, layer in enumerate(self.layers):
            for place, tap in enumerate(taps):
                if hidden is not None and tap == number:
                    ops.copy_columns(hidden, x, place * self.config.hidden_size)
            after = mixer_of(layer.config.mixer).run(step, layer.config, layer.mixer)
            mlp_of(layer.config.mlp).run(replace(step, ahead=layer.ahead, after=after), layer.mlp)

    def restore(self, ops: Ops, arrays: Arrays, accepted: Any) -> None:
        """Take the accepted rows of a chain into the recurrent states of all layers (`RestoringMixer.restore`)."""
        for kind in self.restoring:
            RESTORING[kind]().restore(ops, arrays, accepted)


@dataclass(frozen=True)
class Decoder:
    """A model on the arrays of an executor. A pass leaves in `hidden` the states that a draft reads: the inputs of the
    layers `taps`, or without taps the final norm's output."""

    config: ModelConfig
    layers: BoundLayers
    embedding: Any
    norm: Any
    head: Any
    taps: tuple[int, ...] = ()

    @classmethod
    def bind(cls, config: ModelConfig, arrays: Arrays, caches: CacheLayout, taps: tuple[int, ...] = ()) -> Decoder:
        """Find the weights and caches by name; those of a draft begin with `caches.prefix`."""
        weights = Weights(arrays, caches.prefix)
        head, embedding = weights["lm_head"], weights["embed_tokens"]
        layers = BoundLayers.bind(config, arrays, caches)
        return cls(config, layers, embedding, weights["norm"], embedding if head is None else head, taps)

    def of_each_kind(self) -> Decoder:
        """Return the model with one layer of each kind, for a caller that has to launch every kernel once; with all
        layers where a draft reads the inputs of some (`taps`)."""
        return self if self.taps else replace(self, layers=self.layers.of_each_kind())

    def forward(self, ops: Ops, arrays: Arrays, rows: Rows, hidden: Any | None = None) -> Any:
        """Run the rows of one step through every layer and return x, their last outputs."""
        buffers = self.layers.buffers(arrays, len(rows.token_ids))
        x = buffers["x"]
        ops.embed(x, rows.token_ids, self.embedding, self.config.scale_emb)
        self.layers.run(ops, x, rows, buffers, hidden, self.taps)
        if hidden is not None and not self.taps:
            ops.rms_norm(hidden, x, self.norm, self.config.rms_norm_eps)
        return x

    def logits(self, ops: Ops, out: Any, x: Any) -> None:
        """Fill `out` with the logits of rows of the last layer's output."""
        ops.lm_head(out, x, self.norm, self.head, self.config.rms_norm_eps, self.config.logit_divisor)


def _kind(bound: Any) -> Hashable:
    """Return a key of a bound layer, or of a part of it, that is equal for equal launches: arrays as shape and type."""
    if is_dataclass(bound):
        return type(bound), tuple(_kind(getattr(bound, field.name)) for field in fields(bound))
    if isinstance(bound, tuple):
        return tuple(map(_kind, bound))
    return (tuple(bound.shape), str(bound.dtype)) if hasattr(bound, "dtype") else bound
