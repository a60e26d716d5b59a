"""Work that threads do ahead of its use: in order, bounded, and where the system starts no threads."""

import threading
from functools import partial
from itertools import count, islice

import gguf_models as models
import numpy as np
import pytest

from cpmrt import cores
from cpmrt.config import EngineConfig
from cpmrt.cores import computed_ahead, usable_cores
from cpmrt.dtypes import DType
from cpmrt.models.planning import open_weights
from cpmrt.quantization.gguf_blocks import quantise_rows
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import pack


@pytest.fixture(params=[0, 1, 100], ids=["no thread", "one thread", "all threads"])
def startable(request, monkeypatch):
    """Let the system start so many threads more, and then none."""
    start, left = threading.Thread.start, iter(range(request.param))

    def start_or_refuse(thread):
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)


def test_results_come_in_the_order_of_their_jobs(startable):
    assert list(computed_ahead(partial(pow, number, 2) for number in range(200))) == [n**2 for n in range(200)]
    assert list(computed_ahead([])) == []


def test_few_jobs_are_begun_before_their_results_are_wanted():
    begun = []
    assert list(islice(computed_ahead(partial(begun.append, number) for number in count()), 3)) == [None] * 3
    assert len(begun) <= 3 + 2 * min(8, usable_cores())


@pytest.mark.parametrize("most_threads", [1, 3])
def test_as_many_jobs_run_at_a_time_as_there_may_be_threads(most_threads, monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: 64)
    gate, started = threading.Barrier(most_threads), list[str]()

    def job():
        started.append(threading.current_thread().name)
        gate.wait(10)

    assert list(computed_ahead([job] * (6 * most_threads), most_threads=most_threads)) == [None] * 6 * most_threads
    assert len(set(started)) == most_threads


def test_the_error_of_a_job_is_raised(startable):
    with pytest.raises(ZeroDivisionError):
        list(computed_ahead(partial(divmod, 6, number) for number in (3, 2, 0, 1)))


def test_blocks_are_unpacked_whatever_threads_there_are(startable, tmp_path):
    pair = models.write_pair(tmp_path, "minicpm3", lambda name: "Q8_0")
    found = []
    for path in (pair.folder, pair.gguf):
        with open_weights(ModelFolder.open(path), EngineConfig()) as (checkpoint, specs):
            spec = next(spec for spec in specs if spec.name == "layers.0.kv_up")
            found.append(pack(spec, checkpoint, DType.BFLOAT16))
    assert np.array_equal(*found)


def test_blocks_are_made_whatever_threads_there_are(startable):
    values = np.random.default_rng(0).standard_normal((1000, 256), np.float32)
    rows = quantise_rows("Q8_0", values)
    np.testing.assert_allclose(BLOCK_TYPES["Q8_0"].values(rows), values, rtol=0, atol=0.03)
