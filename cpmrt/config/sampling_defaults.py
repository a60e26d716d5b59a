"""The sampling that the makers of a model recommend, for requests that leave values open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpmrt.config.fields import Fields
from cpmrt.errors import ConfigError, quoted

_OF_SAMPLING = frozenset(("temperature", "top_k", "top_p", "min_p"))
"""Keys that mean nothing to greedy decoding."""
_FIX = "correct the value in that file, or remove it"


@dataclass(frozen=True)
class SamplingDefaults:
    """The values that a request has where it sets none, and their source. Without a recommendation decoding is greedy.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    loop_penalty: float = 1.0
    """The repetition penalty of an answer after its first loop, where loops are looked for; 1: that loop ends it."""
    source: str = "the checkpoint recommends nothing"

    @classmethod
    def of_model(
        cls, generation_config: Mapping[str, Any] | None, config: Mapping[str, Any], source: str
    ) -> SamplingDefaults:
        """Return the defaults in generation_config.json (its path is `source`), else those of the row of a known model.

        `loop_penalty`, for which that file has no key, is always the row's.

        As in Hugging Face, `do_sample` false means greedy, whatever other values there are, and true without a
        temperature means temperature 1. Where `do_sample` is absent, the other values count nevertheless. `config` is
        the object of config.json. Raises ConfigError.
        """
        fields, known = Fields(generation_config or {}, source), _of_known_model(config)
        found = _read(fields) | {"loop_penalty": known.loop_penalty, "source": "generation_config.json"}
        if not fields.boolean("do_sample", True):
            return cls(**{name: found[name] for name in found.keys() - _OF_SAMPLING})
        samples = fields.data.get("do_sample") or not _OF_SAMPLING.isdisjoint(found)
        if not samples and "repetition_penalty" not in found:
            return known
        return cls(**{"temperature": 1.0 if samples else 0.0, **found})

    def __str__(self) -> str:
        """Return what differs from plain sampling, on one line."""
        if self.temperature == 0:
            parts = ["greedy"]
        else:
            parts = [f"temperature {self.temperature:g}"]
            parts += [f"top_k {self.top_k}"] * (self.top_k > 0)
            parts += [f"top_p {self.top_p:g}"] * (self.top_p < 1)
            parts += [f"min_p {self.min_p:g}"] * (self.min_p > 0)
        parts += [f"repetition penalty {self.repetition_penalty:g}"] * (self.repetition_penalty != 1)
        return ", ".join(parts)


def _read(fields: Fields) -> dict[str, Any]:
    """Return the values that the file has, by name. A top_k below 0 means off: some files have -1."""
    found = {
        "temperature": _within(fields, "temperature", 0.0, 1e6),
        "top_k": fields.integer("top_k", None, low=-1),
        "top_p": _within(fields, "top_p", 0.0, 1.0),
        "min_p": _within(fields, "min_p", 0.0, 1.0),
        "repetition_penalty": _within(fields, "repetition_penalty", 1e-3, 1e3),
    }
    if found["top_k"] is not None:
        found["top_k"] = max(0, found["top_k"])
    return {name: value for name, value in found.items() if value is not None}


def _within(fields: Fields, name: str, low: float, high: float) -> float | None:
    value = fields.data.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"{fields.source}: {name}", expected=f"a number in [{low:g}, {high:g}]", actual=quoted(value), fix=_FIX
        )
    return float(value)


@dataclass(frozen=True)
class _KnownModel:
    """A model whose card recommends a sampling; fields of its config.json identify it."""

    architecture: str
    vocab_size: int
    hidden_size: int | None
    """The model's hidden_size; None where any will do."""
    context: int
    """The context that the model was trained for, in tokens."""
    defaults: SamplingDefaults


def _card(name: str, temperature: float, top_p: float, loop_penalty: float = 1.0) -> SamplingDefaults:
    return SamplingDefaults(temperature, top_p=top_p, loop_penalty=loop_penalty, source=f"the model card of {name}")


# Sources: https://huggingface.co/openbmb/<name>. Of MiniCPM5-1B's two settings this is the one for thinking, which its
# template begins with (without: temperature 0.7).
_KNOWN_MODELS = (
    _KnownModel("LlamaForCausalLM", 130560, 2048, 131072, _card("MiniCPM5-2B", 1.0, 0.95, loop_penalty=1.05)),
    _KnownModel("LlamaForCausalLM", 130560, 1536, 131072, _card("MiniCPM5-1B", 0.9, 0.95)),
    _KnownModel("MiniCPMForCausalLM", 73448, None, 32768, _card("MiniCPM4-8B", 0.8, 0.8)),
    _KnownModel("MiniCPMForCausalLM", 73448, None, 65536, _card("MiniCPM4.1-8B", 0.9, 0.95)),
)


def _of_known_model(config: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults of the known model that a config.json is of, else greedy decoding."""
    names, rope = config.get("architectures"), config.get("rope_scaling")
    name = names[0] if isinstance(names, list) and names else None
    native = rope.get("original_max_position_embeddings") if isinstance(rope, Mapping) else None
    context = native or config.get("max_position_embeddings")
    for row in _KNOWN_MODELS:
        sizes = (row.vocab_size, row.hidden_size or config.get("hidden_size"), row.context)
        if name == row.architecture and sizes == (config.get("vocab_size"), config.get("hidden_size"), context):
            return row.defaults
    return SamplingDefaults()
