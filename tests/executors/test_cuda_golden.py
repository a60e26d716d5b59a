"""The CUDA executor on every model of the golden files: Hugging Face transformers, and the reference step by step."""

import pytest
from executors.cuda_models import BASE, ROWS, Agreement, write_golden
from reference import hybrid_models
from reference.golden_models import (
    REFERENCE_ONLY,
    STORAGE_TOLERANCE,
    TINY,
    all_tokens,
    executor_for,
    golden,
    logits_of,
    model,
    relative,
    typical,
)

from cpmrt import LLM, SamplingParams
from cpmrt.config import ModelConfig
from cpmrt.config.architectures import ARCHITECTURES
from cpmrt.config.layers import GroupedAttention
from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.cuda.step.memory import check_supported
from cpmrt.dtypes import DType
from cpmrt.engine.step_log import replay
from cpmrt.errors import UnsupportedModelError

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
CHUNK = 128
ON_A_GPU = [name for name in TINY if name not in REFERENCE_ONLY]
# The GPU rounds where the reference does, but sums in another order; the types have 8 and 11 bits of mantissa.
REFERENCE_TOLERANCE = {DType.BFLOAT16: 2e-2, DType.FLOAT16: 3e-3}
LOGPROB_TOLERANCE = {DType.BFLOAT16: 0.15, DType.FLOAT16: 0.02}
NEAR = SamplingParams(max_new_tokens=26, logprobs=MAX_LOGPROBS, ignore_eos=True)
PENALISED = SamplingParams(
    max_new_tokens=20, logprobs=MAX_LOGPROBS, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.4,
    frequency_penalty=0.2,
)  # fmt: skip


def check(folder, name, dtype):
    """Check the logits of every position, then a greedy and a penalised answer whose steps the reference replays."""
    data, steps = golden(name), []
    prompt = data["prompt_ids"].tolist()
    settings = {"max_context": int(data["max_context"]) or None, "dtype": dtype.label, "prefill_chunk": CHUNK}
    with LLM(folder, executor="cuda", on_step=lambda *record: steps.append(record), **settings) as llm:
        logits = llm.logits(all_tokens(data))
        llm.generate(prompt, NEAR)
        llm.generate(prompt[:40], PENALISED)
    error = typical if "moe" in name else relative
    assert error(logits, data["logits"]) < STORAGE_TOLERANCE[dtype]
    reference = executor_for(name, dtype=dtype, chunk=CHUNK)
    assert error(logits, logits_of(reference, all_tokens(data))) < REFERENCE_TOLERANCE[dtype]
    agreement = Agreement(steps, replay([step for step, _ in steps], reference))
    assert agreement.compared >= 10 and agreement.worst < LOGPROB_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_model_of_transformers(tmp_path, name, dtype):
    check(write_golden(tmp_path, name), name, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["minicpm", "llama_head_dim", "qwen3"])
def test_a_model_on_the_path_of_older_gpus(tmp_path, monkeypatch, name, dtype):
    monkeypatch.setenv("CPMRT_PORTABLE", "1")
    check(write_golden(tmp_path, name), name, dtype)


@pytest.mark.gpu
def test_another_rotation_is_noticed(tmp_path):
    """A model with another rotary table fails the check."""
    with pytest.raises(AssertionError):
        check(write_golden(tmp_path, "rope_linear"), "rope_yarn", DType.FLOAT16)


def test_the_golden_files_hold_every_architecture_and_every_rotation():
    configs = [model(name)[0] for name in TINY]
    hybrid = {hybrid_models.model(name)[0].architecture for name in hybrid_models.HYBRID}
    assert {config.architecture for config in configs} | hybrid == set(ARCHITECTURES)
    assert {config.rope.kind for config in configs} == {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}
    heads = [layer.mixer for config in configs for layer in config.layers if isinstance(layer.mixer, GroupedAttention)]
    assert {mixer.head_dim for mixer in heads} == {64, 96, 128}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_gpu_takes_every_golden_model(name):
    check_supported(model(name)[0])


@pytest.mark.parametrize(("changes", "message"), [
    ({"head_dim": 80}, "head_dim: expected 64, 96 or 128, got 80; use executor='reference'"),
    ({"hidden_size": 2312}, "hidden_size: expected a multiple of 64, got 2312"),
    ({"intermediate_size": 5761}, "intermediate_size: expected a multiple of 64, got 5761"),
    ({"head_dim": 96, "num_attention_heads": 1, "num_key_value_heads": 1}, r"heads \* head_dim: .* of 64, got 96"),
])  # fmt: skip
def test_a_shape_without_kernels_is_refused_with_the_way_out(changes, message):
    config = BASE | ROWS["llama"] | changes
    with pytest.raises(UnsupportedModelError, match=message):
        check_supported(ModelConfig.from_hf(config))
