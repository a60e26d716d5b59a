"""Layers are open: a mixer with a state of its own and an mlp, one file each, run beside those of the product."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import toy_mixer
import toy_mlp
from reference.tiny_models import LLAMA, make_executor, random_weights

from cpmrt.config import EngineConfig, ModelConfig, Sampling, TreeShape
from cpmrt.config.draft import DraftConfig
from cpmrt.config.layers import LayerConfig
from cpmrt.cuda.step.memory import check_supported
from cpmrt.engine import Engine, Request
from cpmrt.engine.step_log import StepLog, read_steps, replay
from cpmrt.errors import ConfigError, UnsupportedModelError
from cpmrt.executor import Admit, Decode, Keep, Prefill, Release
from cpmrt.models.decoder import BoundLayers, cache_layout, tensor_specs
from cpmrt.models.draft import Draft
from cpmrt.models.mixers import MIXERS, RESTORING
from cpmrt.models.mlps import MLPS, mlp_of
from cpmrt.models.planning import plan_model
from cpmrt.ops import Handoff
from cpmrt.reference.ops import NumpyOps

HIDDEN, CONTEXT, DECAY = 64, 256, 0.75
LLAMA_CONFIG = ModelConfig.from_hf(LLAMA)
ATTENTION, GATED = LLAMA_CONFIG.attention, LLAMA_CONFIG.mlp
DECAYING, SINGLE = toy_mixer.Decaying(HIDDEN, DECAY), toy_mlp.SingleMatrix(HIDDEN)
TOYS = (LayerConfig(DECAYING, SINGLE),) * 2
MIXED = (LayerConfig(DECAYING, GATED), LayerConfig(ATTENTION, SINGLE), LayerConfig(DECAYING, SINGLE))
GREEDY = Sampling(temperature=0.0)
RANDOM = np.random.default_rng(5)
TEXTS = [tuple(RANDOM.integers(3, 96, count).tolist()) for count in (150, 70, 9)]


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.setitem(MIXERS, toy_mixer.Decaying, lambda: toy_mixer)
    monkeypatch.setitem(MLPS, toy_mlp.SingleMatrix, lambda: toy_mlp)


@pytest.fixture(params=[TOYS, MIXED], ids=["toys alone", "beside attention"])
def config(request):
    return replace(LLAMA_CONFIG, layers=request.param)


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + LLAMA_CONFIG.rms_norm_eps) * weight


def turned(heads):
    """Apply rotary positions to [T, heads, D]; the halves of a head are real and imaginary parts."""
    half = heads.shape[-1] // 2
    angles = np.arange(len(heads))[:, None] * LLAMA_CONFIG.rope.theta ** (-np.arange(half) / half)
    numbers = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([numbers.real, numbers.imag], axis=-1)


def attended(x, weights):
    """Return the attention layer's output for a whole text in float64."""
    dim, ends = ATTENTION.head_dim, np.cumsum([ATTENTION.q_size, ATTENTION.kv_size])
    q, k, v = (part.reshape(len(x), -1, dim) for part in np.split(x @ weights["qkv"].T, ends, axis=1))
    shared = ATTENTION.num_heads // ATTENTION.num_kv_heads
    k, v = np.repeat(turned(k), shared, axis=1), np.repeat(v, shared, axis=1)
    scores = np.einsum("thd,shd->hts", turned(q), k) / np.sqrt(dim)
    scores = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    seen = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)
    return seen.reshape(len(x), -1) @ weights["output"].T


def decayed(x, weights):
    """Return the decaying layer's output as a weighted sum of all tokens up to each one, without a running state."""
    age = np.arange(len(x))[:, None] - np.arange(len(x))
    return np.where(age >= 0, DECAY ** np.maximum(age, 0), 0.0) @ x @ weights["decaying_output"].T


@cache
def exact_weights(config):
    return {name: array.astype(np.float64) for name, array in random_weights(tensor_specs(config), 0).items()}


def oracle(config, text):
    """Return the logits [T, V] of a whole text in float64, without caches."""
    arrays = exact_weights(config)
    x = arrays["embed_tokens"][list(text)]
    for number, layer in enumerate(config.layers):
        prefix = f"layers.{number}."
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        if layer.mixer == DECAYING:
            x = x + decayed(norm(x, own["decaying_norm"]), own)
        else:
            x = x + attended(norm(x, own["attention_norm"]), own)
        if layer.mlp == SINGLE:
            x = x + norm(x, own["single_norm"]) @ own["single"].T
        else:
            gate, up = np.split(norm(x, own["mlp_norm"]) @ own["gate_up"].T, 2, axis=1)
            x = x + gate / (1 + np.exp(-gate)) * up @ own["down"].T
    return norm(x, arrays["norm"]) @ arrays["lm_head"].T


def near(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=2e-4 * np.abs(expected).max())


def test_the_plan_holds_pages_and_states_side_by_side():
    config = replace(LLAMA_CONFIG, layers=MIXED)
    plan = plan_model(config, EngineConfig(max_sequences=3), itemsize=4, max_context=CONTEXT)
    assert plan.region("decaying").shape == (2, 3, HIDDEN) and plan.region("decaying").dtype == np.float32
    assert plan.region("k_pages").shape == (1, 12, ATTENTION.num_kv_heads, 64, ATTENTION.head_dim)
    assert plan.region("decaying.snapshots").shape == (2, plan.caches.num_snapshots, HIDDEN)
    assert "states" in str(plan) and plan.caches.has_state and plan.region("layers.1.single").shape == (HIDDEN, HIDDEN)


@pytest.mark.parametrize("chunk", [1, 16, 150])
def test_prompts_in_chunks(config, chunk):
    executor = make_executor(config, prefill_chunk=chunk, max_context=CONTEXT)
    for text in TEXTS:  # every text in the same slot
        near(np.concatenate(list(executor.prompt_logits(0, text))), oracle(config, text))


def test_each_mlp_gets_what_the_mixer_before_it_leaves(config, monkeypatch):
    """The handoff of a mixer's last op reaches its own mlp, and no other layer's."""
    left, given = [], []

    class Telling(NumpyOps):
        def project_residual(self, *operands, **options):
            super().project_residual(*operands, **options)
            left.append(Handoff(f"product {len(left)}"))
            return left[-1]

    for mlp in (toy_mlp, mlp_of(GATED)):
        run = mlp.run
        monkeypatch.setattr(mlp, "run", lambda step, bound, run=run: (given.append(step.after), run(step, bound)))
    executor = make_executor(config, max_context=CONTEXT)
    executor.ops = Telling(executor.ops.dtype)
    next(executor.prompt_logits(0, TEXTS[2]))
    assert given == left[::2] and len(left) == 2 * len(config.layers)


def test_slots_together_and_again(config):
    """Texts that run together, and later ones in the same slots, each have their own state, which begins at zero."""
    executor = make_executor(config, max_sequences=3, max_context=CONTEXT)
    for shift in range(3):
        texts = [list(TEXTS[(slot + shift) % 3]) for slot in range(3)]
        for slot, text in enumerate(texts):
            executor.submit(Admit(slot, GREEDY, 0, 50, ())).wait()
            for start in range(0, len(text), 16):
                prompt = tuple(text[start : start + 16])
                result = executor.submit(Prefill(slot, prompt, start, start + 16 >= len(text))).wait()
            near(executor.array("logits")[0], oracle(config, text)[-1])
            text += result.slots[0].token_ids
        for slots in ((0, 1, 2), (2, 0), (1,), (1, 2, 0)):
            for slot, result in zip(slots, executor.submit(Decode(slots)).wait().slots, strict=True):
                near(executor.array("logits")[slots.index(slot)], oracle(config, texts[slot])[-1])
                texts[slot] += result.token_ids
        for slot in range(3):
            executor.submit(Release(slot)).wait()


def test_what_cannot_be_is_refused():
    config = replace(LLAMA_CONFIG, layers=MIXED)
    draft = Draft(DraftConfig.lookup(), (TreeShape.chain(3),))
    with pytest.raises(ConfigError, match="decaying.*on_accept=None"):
        plan_model(config, EngineConfig(), itemsize=4, max_context=CONTEXT, draft=draft)
    with pytest.raises(UnsupportedModelError, match="layers together: .* got Decaying, GroupedAttention"):
        check_supported(config)


def test_states_take_up_accepted_rows_in_all_layers_of_a_kind_at_once(monkeypatch):
    """A kind of mixer that says how its states follow a chain needs no executor to know it by name."""
    caches, asked = toy_mixer.caches, []

    def follows(mixer, kv_dtype):
        return tuple(replace(spec, on_accept="restore") for spec in caches(mixer, kv_dtype))

    monkeypatch.setattr(toy_mixer, "caches", follows)
    monkeypatch.setattr(toy_mixer, "restore", lambda *given: asked.append(given), raising=False)
    config = replace(LLAMA_CONFIG, layers=MIXED)
    layout = cache_layout(config, CONTEXT, 1)
    arrays = {spec.name: np.zeros(shape, np.float32) for spec, shape in layout.arrays()}
    layers = BoundLayers.bind(config, arrays, layout)
    with pytest.raises(KeyError, match="Decaying"):
        layers.restore(None, arrays, "a path")
    monkeypatch.setitem(RESTORING, toy_mixer.Decaying, lambda: toy_mixer)
    layers.restore("ops", arrays, "a path")
    assert asked == [("ops", arrays, "a path")]


CHATS = [TEXTS[0][:140], TEXTS[0][:100], TEXTS[0], (*TEXTS[0][:130], 5, 6), TEXTS[0][:140], TEXTS[1], (*TEXTS[0], 9)]
CACHED = [0, 0, 128, 128, 128, 0, 128]


def answers(config, listener=None, **settings):
    """Ask all texts one by one, then together; return the answers and each prompt's number of cached tokens."""
    executor = make_executor(config, prefill_chunk=33, max_sequences=2, max_context=CONTEXT)
    engine = Engine(executor, listener, **settings)
    found, cached = [], []
    for prompts in (*([prompt] for prompt in CHATS), CHATS):
        sequences = [engine.add(Request(prompt, GREEDY, 0, (), 6)) for prompt in prompts]
        found += [[token for result in engine.stream(seq) for token in result.token_ids] for seq in sequences]
        cached += [seq.num_cached for seq in sequences]
    return found, cached


def test_prefixes_are_resumed_where_their_state_was_kept(config, tmp_path):
    """Texts go on from kept states; the second is a prefix of the first that ends before the border of a kept state."""
    text = io.StringIO()
    found, cached = answers(config, StepLog(text))
    assert cached[: len(CHATS)] == CACHED
    assert (found, [0] * len(found)) == answers(config, prefix_cache=False)
    (tmp_path / "steps.jsonl").write_text(text.getvalue())
    recorded = list(read_steps(tmp_path / "steps.jsonl"))
    assert any(isinstance(step, Keep) for step, _ in recorded)
    again = make_executor(config, prefill_chunk=33, max_sequences=2, max_context=CONTEXT)
    assert list(replay((step for step, _ in recorded), again)) == recorded


def test_the_logits_behind_a_snapshot(config):
    executor = make_executor(config, prefill_chunk=128, max_sequences=2, max_context=CONTEXT)
    text, pages = TEXTS[0], (0, 1, 2)
    executor.submit(Admit(0, GREEDY, 0, 5, (), pages)).wait()
    executor.submit(Prefill(0, text[:128], 0, False)).wait()
    executor.submit(Keep(0, 3)).wait()
    executor.submit(Prefill(0, text[128:], 128, True)).wait()
    executor.submit(Admit(1, GREEDY, 0, 5, (), (0, 1, 5), snapshot=3)).wait()
    executor.submit(Prefill(1, (7, 8, 9), 128, True)).wait()
    near(executor.array("logits")[0], oracle(config, (*text[:128], 7, 8, 9))[-1])
