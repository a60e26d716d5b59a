"""POST /v1/embeddings: texts as vectors."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, cast

from cpmrt.dtypes import F32
from cpmrt.job_maker import Pooling
from cpmrt.server.errors import invalid, naming, unsupported
from cpmrt.server.exchange import usage_of
from cpmrt.server.json_body import Fields, shown
from cpmrt.server.responses import json_parts
from cpmrt.server.schema import check_model, read_prompts
from cpmrt.server.service import Service
from cpmrt.server.unused_fields import REFUSED_IN_EMBEDDINGS, check_unused
from cpmrt.sharing.jobs import Reading

MAX_INPUTS = 2048
_FORMATS = ("float", "base64")
_POOLINGS = ("mean", "last")


class Embeddings:
    """Embeds the texts of one request (`PromptWork`), as many at a time as there are slots; `answer` is the JSON.

    Raises ApiError, RequestError.
    """

    def __init__(self, service: Service, body: dict[str, Any]):
        self._llm = service.engine.llm
        self._model = service.settings.model_name
        fields = Fields(body)
        check_model(fields, service.settings.model_names)
        check_unused(fields, REFUSED_IN_EMBEDDINGS)
        prompts = read_prompts(fields, "input", MAX_INPUTS)
        self._is_base64 = _one_of(fields, "encoding_format", _FORMATS) == "base64"
        normalizes = fields.boolean("normalize") is not False
        pooling = cast(Pooling, _one_of(fields, "pooling", _POOLINGS))
        size, dimensions = self._llm.config.hidden_size, fields.integer("dimensions")
        if dimensions not in (None, size):
            raise unsupported("dimensions", f"the vectors of this model have {size}")
        texts = prompts if len(prompts) > 1 else prompts[0]
        with naming({"prompt": "input"}):
            self._readings = self._llm.maker.embed(texts, pooling, normalizes, "input")
        self._running: Sequence[Reading] = ()
        self._is_cancelled = False
        self.answer: Sequence[bytearray] = ()

    def run(self) -> None:
        """Embed the texts. Raises CpmrtError."""
        at_once = self._llm.engine.limits.max_sequences
        for start in range(0, len(self._readings), at_once):
            self._running = self._readings[start : start + at_once]
            if self._is_cancelled:  # looked at behind the readings, which `cancel` would end otherwise
                return
            self._llm.shared.run(self._running)
        if not self._is_cancelled:
            self.answer = json_parts(self._content())

    def cancel(self) -> None:
        """Have `run` end soon, without an answer."""
        self._is_cancelled = True
        self._llm.shared.cancel(self._running)

    def _content(self) -> dict[str, Any]:
        num_tokens = sum(reading.num_tokens for reading in self._readings)
        usage = usage_of(num_tokens, 0, 0)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._written(reading.result)}
                for index, reading in enumerate(self._readings)
            ],
            "model": self._model,
            "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
        }

    def _written(self, vector: F32) -> str | list[float]:
        if self._is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return cast(list[float], vector.tolist())


def _one_of(fields: Fields, name: str, values: Sequence[str]) -> str:
    """Return a field that has one of these values, by default the first. Raises ApiError 400."""
    value = fields.string(name) or values[0]
    if value not in values:
        raise invalid(name, f"expected {' or '.join(values)}, got {shown(value)}")
    return value
