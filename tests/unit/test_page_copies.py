"""KV pages between the arena and the host, with a NumPy arena and copies that move its bytes when the stream waits."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from cpmrt.cuda.load import page_copies

TO_HOST, TO_DEVICE = 2, 1


class Array:
    """Stand-in for a device array over a NumPy array, with what the copies use."""

    def __init__(self, values):
        self.values, self.dtype, self.shape = values, values.dtype, values.shape
        self.data = SimpleNamespace(ptr=values.ctypes.data)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


class HostMemory:
    def __init__(self, nbytes):
        self._bytes = np.full(nbytes, 0xEE, np.uint8)
        self.address, self.is_open = self._bytes.ctypes.data, True

    def array(self, dtype):
        return self._bytes.view(dtype)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bytes[:] = 0xDD  # it must not be read any more


class Stream:
    """A stream whose copies happen in order, when somebody waits for them."""

    ptr = 77

    def __init__(self):
        self.pending, self.directions = [], set()

    def copy(self, target, target_step, source, source_step, width, height, kind, stream):
        assert stream == self.ptr and width <= min(target_step, source_step)
        self.directions.add(kind)
        rows = [(target + row * target_step, source + row * source_step, width) for row in range(height)]
        self.pending.append(rows)

    def synchronize(self):
        for rows in self.pending:
            for row in rows:
                ctypes.memmove(*row)
        self.pending.clear()


@pytest.fixture
def stream(monkeypatch):
    made = Stream()
    runtime = SimpleNamespace(
        memcpy2DAsync=made.copy, memcpyHostToDevice=TO_DEVICE, memcpyDeviceToHost=TO_HOST
    )
    for name, content in (("cupy", {}), ("cupy.cuda", {"runtime": runtime})):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(page_copies, "HostBuffer", HostMemory)
    return made


def arrays():
    random = np.random.default_rng(0)
    return {
        "k_pages": random.integers(0, 2**16, (3, 9, 2, 64, 8), np.uint16),
        "v_codes": random.integers(0, 256, (3, 9, 2, 64, 8), np.uint8),
        "v_scales": random.random((3, 9, 2), np.float32),
        "draft.k_pages": random.integers(0, 2**16, (1, 9, 4, 64, 4), np.uint16),
    }


PAGES = (7, 0, 3)


def test_reading(stream):
    memory = arrays()
    found = page_copies.read_pages({name: Array(values) for name, values in memory.items()}, PAGES, stream)
    assert stream.directions == {TO_HOST} and list(found) == list(memory)
    for name, values in memory.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values[:, list(PAGES)])


def test_writing_leaves_other_pages_alone(stream):
    memory, before = arrays(), arrays()
    contents = {name: np.flip(values, 1)[:, : len(PAGES)] for name, values in arrays().items()}
    page_copies.write_pages({name: Array(values) for name, values in memory.items()}, PAGES, contents, stream)
    assert stream.directions == {TO_DEVICE} and not stream.pending
    others = [page for page in range(9) if page not in PAGES]
    for name, values in memory.items():
        np.testing.assert_array_equal(values[:, list(PAGES)], contents[name])
        np.testing.assert_array_equal(values[:, others], before[name][:, others])
