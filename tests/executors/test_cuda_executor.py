"""The CUDA executor against the reference: the same models, sampling and state machine."""

import json
from pathlib import Path

import numpy as np
import pytest

from cpmrt import LLM, SamplingParams
from cpmrt.config import ModelConfig
from cpmrt.engine.step_log import replay
from cpmrt.models.decoder import tensor_specs

pytestmark = pytest.mark.gpu

BASE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 1024,
    "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
ROWS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama_bias": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "head_dim": 128},
    "minicpm": {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 2, "scale_depth": 1.4, "dim_model_base": 64},
    "minicpm_96": {"architectures": ["MiniCPMForCausalLM"], "tie_word_embeddings": False, "head_dim": 96},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 8},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1},
}
SAMPLED = SamplingParams(max_new_tokens=48, temperature=0.9, top_p=0.95, top_k=40, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module", params=list(ROWS))
def checkpoint(request, tmp_path_factory):
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp(request.param)
    config = {**BASE, **ROWS[request.param], "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(_EMPTY_TOKENIZER)
    random, tensors = np.random.default_rng(7), {}
    for spec in tensor_specs(ModelConfig.from_hf(config)):
        for source in spec.sources:
            is_norm = source.name.endswith("norm.weight")
            deviation = 0.1 if len(source.shape) == 1 else source.shape[-1] ** -0.5
            tensors[source.name] = (random.standard_normal(source.shape) * deviation + is_norm).astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


_EMPTY_TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("length", [1, 5, 64, 65, 130, 300])
def test_logits_are_those_of_the_reference(checkpoint, dtype, length):
    ids = np.random.default_rng(length).integers(3, 1000, length).tolist()
    with LLM(checkpoint, executor="reference", dtype=dtype) as reference:
        expected = reference.logits(ids)
    with LLM(checkpoint, executor="cuda", dtype=dtype, prefill_chunk=128) as llm:
        actual = llm.logits(ids)
    assert np.isfinite(actual).all()
    assert relative(actual, expected) < (3e-2 if dtype == "bfloat16" else 5e-3)


@pytest.mark.parametrize("settings", [
    {"cuda_graphs": False}, {"dependent_launch": False}, {"cuda_graphs": False, "dependent_launch": False},
])  # fmt: skip
def test_graphs_and_dependent_launches_do_not_change_a_bit(checkpoint, settings):
    prompt = list(range(5, 100))
    with LLM(checkpoint, executor="cuda") as llm:
        expected = [llm.generate(prompt, params).token_ids for params in (SAMPLED, GREEDY)]
    with LLM(checkpoint, executor="cuda", **settings) as llm:
        assert [llm.generate(prompt, params).token_ids for params in (SAMPLED, GREEDY)] == expected


def test_a_request_gives_the_same_tokens_alone_and_under_load(checkpoint):
    prompts = [list(range(3 + i, 40 + 7 * i)) for i in range(5)]
    with LLM(checkpoint, executor="cuda", max_sequences=8) as llm:
        alone = [llm.generate(prompt, SAMPLED).token_ids for prompt in prompts]
        streams = [llm.stream(prompt, SAMPLED) for prompt in prompts]
        together = [stream.finish().token_ids for stream in streams]
    assert together == alone


@pytest.fixture(scope="module")
def demo():
    with LLM(executor="cuda") as llm:
        yield llm


@pytest.fixture(scope="module")
def reference_demo():
    with LLM(executor="reference") as llm:
        yield llm


def test_the_demo_model_answers(demo):
    out = demo.chat([{"role": "user", "content": "What does os.path.join do?"}], SamplingParams(max_new_tokens=80))
    assert "Join two or more pathname components" in out.text and out.finish_reason == "stop"


def test_demo_greedy_tokens_are_the_best_or_tied_with_it(demo, reference_demo):
    for prompt in ("def read_lines(path):", "import os\n\nclass Stack:", "x" * 300):
        out = demo.generate(prompt, SamplingParams(max_new_tokens=100, ignore_eos=True))
        ids = demo.tokenizer.encode(prompt)
        logits = reference_demo.logits([*ids, *out.token_ids])[len(ids) - 1 : -1]
        chosen = logits[np.arange(len(out.token_ids)), list(out.token_ids)]
        assert (logits.max(1) - chosen < 0.25).all()
        assert (logits.argmax(1) == list(out.token_ids)).mean() > 0.95


def test_demo_scores(demo, reference_demo):
    ids = demo.tokenizer.encode(Path(json.__file__).read_text())[:2000]
    np.testing.assert_allclose(demo.score(ids).mean(), reference_demo.score(ids).mean(), atol=5e-3)


def test_logprobs_match_the_reference(demo, reference_demo):
    params = SamplingParams(max_new_tokens=8, logprobs=5)
    ours = demo.generate("def main():", params)
    theirs = reference_demo.score([*demo.tokenizer.encode("def main():"), *ours.token_ids])[-8:]
    np.testing.assert_allclose([entry.logprob for entry in ours.logprobs], theirs, atol=0.1)
    assert all(entry.top[0][0] == entry.token_id and len(entry.top) == 5 for entry in ours.logprobs)


def test_a_step_log_replays(demo):
    steps = []
    with LLM(executor="cuda", on_step=lambda *record: steps.append(record)) as llm:
        llm.generate("def f(", SAMPLED)
    with LLM(executor="cuda") as llm:
        assert list(replay([step for step, _ in steps], llm.executor)) == steps


def test_ten_thousand_tokens_without_drift():
    outputs = []
    for graphs in (True, False):
        with LLM(executor="cuda", cuda_graphs=graphs) as llm:
            params = SamplingParams(max_new_tokens=2500, temperature=1.0, ignore_eos=True)
            outputs.append([llm.generate("import ", params).token_ids for _ in range(4 if graphs else 1)])
    assert outputs[0][0] == outputs[1][0] and sum(map(len, outputs[0])) == 10_000


def test_closing_frees_the_device():
    cupy = pytest.importorskip("cupy")
    with LLM(executor="cuda") as warm:
        warm.generate("x", GREEDY)
    before = cupy.cuda.runtime.memGetInfo()[0]
    llm = LLM(executor="cuda")
    llm.generate("x", GREEDY)
    assert cupy.cuda.runtime.memGetInfo()[0] <= before - llm.plan.total_bytes + (4 << 20)
    llm.close()
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (8 << 20)
