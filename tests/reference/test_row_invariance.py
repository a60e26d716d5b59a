"""In steps of at most 64 rows, the bits of a row do not depend on the other rows, their number, or its place."""

from __future__ import annotations

import numpy as np
import pytest
from reference.operands import EPS, Data, filled_pages, make_rows, rope_of
from reference.tiny_models import LLAMA, MINICPM, make_executor

from cpmrt.config import ModelConfig, Sampling
from cpmrt.dtypes import DType
from cpmrt.executor import Admit, Decode, Prefill
from cpmrt.ops import KVPages, QkvWeights
from cpmrt.reference.ops import NumpyOps, linear

COUNTS = (1, 2, 5, 8, 12, 16, 31, 32, 64)
SIZES = pytest.mark.parametrize(("inputs", "outputs"), [(96, 72), (256, 640), (1024, 4096)])


@SIZES
def test_linear(inputs, outputs):
    data = Data()
    x, weight = data(64, inputs), data.weight(outputs, inputs)
    whole = linear(x, weight)
    for count in COUNTS:
        assert np.array_equal(linear(x[:count], weight), whole[:count])


@SIZES
def test_linear_gives_equal_rows_equal_bits_wherever_they_stand(inputs, outputs):
    data = Data()
    x, weight = data(64, inputs), data.weight(outputs, inputs)
    alone = linear(x[:1], weight)[0]
    for place in (1, 2, 3, 5, 7, 8, 14, 63):
        moved = x.copy()
        moved[place] = x[0]
        assert np.array_equal(linear(moved, weight)[place], alone)


@SIZES
def test_gate_up(inputs, outputs):
    data, ops = Data(DType.BFLOAT16), NumpyOps(DType.BFLOAT16)
    x, norm, weight = data(64, inputs), data.norm(inputs), data.weight(outputs, inputs)
    outs = {count: np.empty((count, outputs // 2), np.float32) for count in COUNTS}
    for count, out in outs.items():
        ops.gate_up(out, x[:count], norm, weight, EPS)
    assert all(np.array_equal(out, outs[64][:count]) for count, out in outs.items())


@SIZES
def test_project_residual(inputs, outputs):
    data, ops = Data(), NumpyOps(DType.FLOAT32)
    before, inner, weight = data(64, outputs), data(64, inputs), data.weight(outputs, inputs)
    whole = before.copy()
    ops.project_residual(whole, inner, weight, None, 0.25)
    for count in COUNTS:
        x = before[:count].copy()
        ops.project_residual(x, inner[:count], weight, None, 0.25)
        assert np.array_equal(x, whole[:count])


@SIZES
def test_lm_head(inputs, outputs):
    data, ops = Data(), NumpyOps(DType.FLOAT32)
    x, norm, weight = data(64, inputs), data.norm(inputs), data.weight(outputs, inputs)
    whole = np.empty((64, outputs), np.float32)
    ops.lm_head(whole, x, norm, weight, EPS, 4.0)
    for count in COUNTS:
        logits = np.empty((count, outputs), np.float32)
        ops.lm_head(logits, x[:count], norm, weight, EPS, 4.0)
        assert np.array_equal(logits, whole[:count])


@pytest.mark.parametrize("hidden", [96, 256, 1024])
def test_qkv(hidden):
    data, ops, head_dim = Data(), NumpyOps(DType.FLOAT32), 64
    x, norm, weight = data(64, hidden), data.norm(hidden), data.weight(8 * head_dim, hidden)
    bias, head_norm, tables = data(8 * head_dim), data.norm(head_dim), data.tables(64, 2)
    positions, slots = data.random.integers(0, 128, 64), data.random.permutation(64)
    results = {}
    for count in COUNTS:
        q = np.empty((count, 4 * head_dim), np.float32)
        k_pages, v_pages = (np.zeros((128, 2, 64, head_dim), np.float32) for _ in "kv")
        rows = make_rows(positions[:count], slots[:count], tables)
        weights = QkvWeights(norm, weight, bias, head_norm, head_norm)
        ops.qkv(q, KVPages(k_pages, v_pages), x[:count], weights, rope_of(128, head_dim), rows, EPS)
        places = tables[rows.slots, rows.positions // 64], slice(None), rows.positions % 64
        results[count] = (q, k_pages[places], v_pages[places])
    for count in COUNTS:
        for part, whole in zip(results[count], results[64], strict=True):
            assert np.array_equal(part, whole[:count])


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_decode_attention(head_dim):
    data, ops = Data(), NumpyOps(DType.FLOAT32)
    tables, lengths = data.tables(4, 3), [1, 64, 65, 190]
    k_pages, v_pages = filled_pages(data, tables, lengths, 2, head_dim)
    slots = data.random.integers(0, 4, 64)
    positions, q = np.array(lengths)[slots] - 1, data(64, 8 * head_dim)
    outs = {count: np.empty((count, 8 * head_dim), np.float32) for count in COUNTS}
    for count, out in outs.items():
        rows = make_rows(positions[:count], slots[:count], tables)
        ops.decode_attention(out, q[:count], KVPages(k_pages, v_pages), rows, 0.125)
    assert all(np.array_equal(out, outs[64][:count]) for count, out in outs.items())


@pytest.mark.parametrize("base", [LLAMA, MINICPM], ids=["llama", "minicpm"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_sequences_decode_together_as_each_does_alone(base, dtype):
    """Sequences that decode together have, to the bit, the log-probabilities that each has alone."""
    config = ModelConfig.from_hf(base | {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8})
    random = np.random.default_rng(1)
    prompts = [tuple(random.integers(0, 96, count).tolist()) for count in (3, 64, 65, 20, 1, 50, 7, 31, 90)]
    sampling = Sampling(temperature=0.8, logprobs=5)

    def start(executor, slot, prompt, seed):
        executor.submit(Admit(slot, sampling, seed, 12, ()))
        chunk = executor.limits.prefill_chunk
        for begin in range(0, len(prompt), chunk):
            is_last = begin + chunk >= len(prompt)
            step = Prefill(slot, prompt[begin : begin + chunk], begin, is_last)
            result = executor.submit(step).wait().slots[0]
        return [result]

    together = make_executor(config, dtype=dtype, max_sequences=len(prompts), max_context=128)
    results = [start(together, slot, prompt, slot) for slot, prompt in enumerate(prompts)]
    for step in range(11):
        slots = tuple(np.random.default_rng(step).permutation(len(prompts)).tolist())
        for slot, result in zip(slots, together.submit(Decode(slots)).wait().slots, strict=True):
            results[slot].append(result)
    for slot, prompt in enumerate(prompts):
        alone = make_executor(config, dtype=dtype, max_context=128)
        expected = start(alone, 0, prompt, slot)
        expected += [alone.submit(Decode((0,))).wait().slots[0] for _ in range(11)]
        assert results[slot] == expected
