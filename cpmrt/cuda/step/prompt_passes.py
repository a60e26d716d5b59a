"""Runs chunks of a prompt outside of steps, for the logits or states of every position: for tools and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.step.forward import StepForward
from cpmrt.dtypes import F32, DType, to_float32
from cpmrt.executor import MAX_ROWS

if TYPE_CHECKING:
    from cupy.cuda import Stream


@dataclass(frozen=True)
class PromptPasses:
    """Runs chunks with `forward` on `arrays`, the executor's regions by name, and reads on the host what they left."""

    config: ModelConfig
    forward: StepForward
    arrays: Mapping[str, DeviceArray]
    dtype: DType
    stream: Stream

    def set_table(self, slot: int, block_table: tuple[int, ...]) -> None:
        """Give a slot its pages; without a table it keeps those that it has."""
        if block_table:
            with self.stream:
                self.arrays["block_tables"][slot, : len(block_table)].set(np.array(block_table, np.int32))

    def run(self, slot: int, token_ids: tuple[int, ...], start: int, bucket: int) -> None:
        """Run a chunk from position `start` on; rows of the bucket beyond its tokens are padding."""
        count = len(token_ids)
        with self.stream:
            for name, values, padding in (
                ("token_ids", np.array(token_ids), 0),
                ("positions", np.arange(start, start + count), 0),
                ("slots", np.full(count, slot), -1),
            ):
                padded = np.full(bucket, padding, np.int32)
                padded[:count] = values
                self.arrays[name][:bucket].set(padded)
            self.arrays["chunk"].set(np.array([slot, start, count, 0], np.int32))
        self.forward.chunk(bucket)

    def logits(self, num_rows: int) -> F32:
        """Return the logits of the rows of the chunk that ran last, float32 [rows, V]."""
        logits, out = np.empty((num_rows, self.config.vocab_size), np.float32), self.arrays["logits"][:MAX_ROWS]
        # MAX_ROWS rows at a time, the last of them perhaps padding: another number might need one more kernel compiled.
        for first in range(0, num_rows, len(out)):
            rows, count = self.arrays["x"][first : first + len(out)], min(len(out), num_rows - first)
            self.forward.head(out[: len(rows)], rows)
            logits[first : first + count] = out[:count].get(stream=self.stream)
        return logits

    def states(self, num_rows: int) -> F32:
        """Return the final norm's output for those rows, float32 [rows, H]; the host computes that norm."""
        x, norm = (
            to_float32(array.get(stream=self.stream).view(self.dtype.storage), self.dtype)
            for array in (self.arrays["x"][:num_rows], self.arrays["norm"])
        )
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        states: F32 = x * np.reciprocal(np.sqrt(mean_square + np.float32(self.config.rms_norm_eps))) * norm
        return states
