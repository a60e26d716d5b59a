"""The bundled model on a GPU in many threads, most of which have not used CUDA; embeddings compared with NumPy."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cpmrt import LLM, AsyncLLM, SamplingParams
from cpmrt.errors import ClosedError

pytestmark = pytest.mark.gpu

SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
TEXTS = ["one", "a longer text, of more than one chunk of the prompt", "x" * 150]


@pytest.mark.parametrize("settings", [
    {"max_sequences": 4}, {"max_sequences": 1}, {"cuda_graphs": False}, {"draft": "lookup"}, {"steps_per_launch": 4},
], ids=str)  # fmt: skip
def test_threads_get_what_they_get_alone(settings):
    with LLM(executor="cuda", max_context=512, prefill_chunk=64, **settings) as llm:
        asks = [(f"prompt {n}", SamplingParams(max_new_tokens=30, temperature=1.0, seed=n)) for n in range(8)]
        alone, score, vector = [llm.generate(*ask).token_ids for ask in asks], llm.score(TEXTS[1]), llm.embed(TEXTS[2])

        def call(number):
            ask, source = asks[number], random.Random(number)
            for _ in range(10):
                kind = source.randrange(5)
                if kind == 0:
                    assert llm.generate(*ask).token_ids == alone[number]
                elif kind == 1:
                    tokens = tuple(token for piece in llm.stream(*ask) for token in piece.token_ids)
                    assert tokens == alone[number]
                elif kind == 2:
                    next(llm.stream(*ask))
                elif kind == 3:
                    np.testing.assert_array_equal(llm.score(TEXTS[1]), score)
                else:
                    np.testing.assert_array_equal(llm.embed(TEXTS[2]), vector)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(8)))
        assert llm.shared.is_idle and len(llm.engine.slots.free) == settings.get("max_sequences", 1)
        assert llm.engine.cache.pool.num_held == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_the_reference(dtype, pooling):
    settings = {"dtype": dtype, "prefill_chunk": 64, "max_context": 512}
    with LLM(executor="cuda", **settings) as ours, LLM(executor="reference", **settings) as theirs:
        found, expected = ours.embed(TEXTS, pooling=pooling), theirs.embed(TEXTS, pooling=pooling)
    assert found.shape == expected.shape and len(found) == 3 and found.dtype == np.float32
    assert (np.sum(found * expected, axis=1) > 0.999).all()


def test_an_embedding_leaves_running_streams_as_they_are():
    with LLM(executor="cuda", max_context=512, max_sequences=2) as llm:
        alone, stream = llm.generate("abc", SAMPLED), llm.stream("abc", SAMPLED)
        pieces = [next(stream)]
        llm.embed(TEXTS)
        assert tuple(token for piece in [*pieces, *stream] for token in piece.token_ids) == alone.token_ids


def test_an_event_loop_drives_from_a_thread_of_its_own():
    async def run(llm):
        async with AsyncLLM(llm) as fast:
            return await asyncio.gather(fast.generate("abc", SAMPLED), fast.embed(TEXTS), fast.score(TEXTS[0]))

    llm = LLM(executor="cuda", max_context=512, cuda_graphs=False)
    expected, vectors = llm.generate("abc", SAMPLED), llm.embed(TEXTS)
    answer, found, _ = asyncio.run(run(llm))
    assert answer.token_ids == expected.token_ids
    np.testing.assert_array_equal(found, vectors)


def test_another_thread_may_close():
    llm = LLM(executor="cuda", max_context=512)
    stream = llm.stream("abc", SamplingParams(max_new_tokens=400, ignore_eos=True))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(llm.close).result(60)
    with pytest.raises(ClosedError):
        list(stream)
