"""Quantised sources in the staging area: waves, reads, and the places at which a device finds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import write_pair
from reference.quantised_models import CASES, raw_tensors, write_quantised, write_safetensors

from cpmrt.config import EngineConfig
from cpmrt.cuda.load import repack
from cpmrt.cuda.load.read import read_all
from cpmrt.cuda.load.repack import piece_reads, staging_bytes, waves
from cpmrt.dtypes import DType, from_float32, to_float32
from cpmrt.errors import CheckpointError
from cpmrt.models.planning import weight_specs
from cpmrt.tensor_spec import Packing, Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import format_of
from cpmrt.weights.gguf.specs import without_blocks
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.quantised import check_values, read_codes, read_scales
from cpmrt.weights.safetensors import FLOATS

BASE = 1024
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class HostTarget:
    """A load target whose arena is host memory."""

    def __init__(self, nbytes: int, dtype: DType):
        self.arena, self.dtype = np.zeros(nbytes, np.uint8), dtype
        self.slots = [memoryview(bytearray(1 << 20)) for _ in range(3)]

    def wait(self, slot: int) -> None:
        """Return at once, as no copy is ever in flight."""

    def submit(self, slot: int, job: Any) -> None:
        data = np.frombuffer(self.slots[slot][: job.nbytes], np.uint8)
        if job.stored not in (None, self.dtype):
            values = to_float32(data.view(job.stored.storage), job.stored)
            data = from_float32(values, self.dtype).view(np.uint8)
        self.arena[job.destination : job.destination + data.size] = data


@by_case
@pytest.mark.parametrize("limit", [0, 1 << 16, 1 << 30])
def test_every_tensor_is_where_its_piece_says(
    case: Any, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack, "LARGEST_STAGING_BYTES", limit)
    monkeypatch.setattr(repack, "ROUNDED_BYTES", 10_000)
    folder, dtype = ModelFolder.open(write_quantised(case, tmp_path / case.name, 3)), DType.BFLOAT16
    head_bits = None if case.head else 8 if limit else 4
    with Checkpoint.open(folder.path) as checkpoint:
        specs = weight_specs(folder.config, EngineConfig(lm_head_bits=head_bits), checkpoint)
        size, rows = staging_bytes(specs), dict[str, int]()
        for wave in waves(specs, size):
            target = HostTarget(BASE + size, dtype)
            jobs = [job for piece in wave for job in piece_reads(piece, checkpoint, BASE, dtype)]
            read_all(jobs, target, num_readers=2)
            for piece in wave:
                check_piece(piece, checkpoint, target.arena[BASE:], dtype)
                assert piece.first_row == rows.get(piece.spec.name, 0) and piece.end_byte <= size
                rows[piece.spec.name] = piece.first_row + piece.end - piece.begin
        assert rows == {spec.name: spec.shape[0] for spec in specs if spec.quant}


def check_piece(piece: Any, checkpoint: Checkpoint, staged: Any, dtype: DType) -> None:
    source, (count, columns) = piece.source, (piece.end - piece.begin, piece.source.shape[1])
    if source.packing is None:
        entry = checkpoint.entries[source.name]
        rows = np.ascontiguousarray(checkpoint.view(source.name)[piece.begin : piece.end])
        values = to_float32(rows, FLOATS[entry.dtype])
        found = staged[piece.values : piece.values + 2 * count * columns].view(dtype.storage)
        assert np.array_equal(found, from_float32(values, dtype).reshape(-1))
        assert piece.scales - piece.codes >= count * columns * piece.spec.quant.bits // 8
        return
    row, sizes = format_of(source), (count, columns, groups := columns // source.packing.group_size)
    shape = row.codes.shape(*sizes)
    words = staged[piece.codes : piece.codes + count * columns // 2].view(np.int32).reshape(shape)
    assert np.array_equal(row.codes.unpack(words), read_codes(source, checkpoint, 0, count))
    stored = FLOATS[checkpoint.entries[row.scales.of(source.name)].dtype]
    scales = staged[piece.scales : piece.scales + 2 * count * groups].view(stored.storage)
    grid = row.scales.unpack(scales.reshape(row.scales.shape(*sizes)))
    assert np.array_equal(to_float32(np.ascontiguousarray(grid), stored), read_scales(source, checkpoint))
    if not source.packing.symmetric:
        expected = checkpoint.view(row.zeros.of(source.name))
        assert np.array_equal(staged[piece.zeros : piece.zeros + expected.nbytes].view(np.int32), expected.reshape(-1))


@by_case
def test_values_that_are_right_pass_the_check(case: Any, tmp_path: Path) -> None:
    with packed_sources(write_quantised(case, tmp_path / case.name, 3)) as (sources, checkpoint):
        for source in sources:
            check_values(source, checkpoint, DType.BFLOAT16)
            check_values(source, checkpoint, DType.FLOAT16)


@pytest.mark.parametrize(
    ("name", "tensor", "words", "message"),
    [
        ("gptq", "mlp.down_proj.scales", np.float16([np.nan]), "scales that are not finite"),
        ("marlin", "mlp.down_proj.scales", np.float16([-np.inf]), "scales that are not finite"),
        ("compressed", "mlp.down_proj.weight_scale", np.uint16([0xC900]), "beyond float16; use dtype bfloat16"),
        ("gptq", "mlp.down_proj.qzeros", np.int32([0x77777776]), "contradicts the symmetric quantisation"),
        ("auto_round_gptq", "mlp.down_proj.qzeros", np.int32([0x07777777]), "contradicts the symmetric quantisation"),
    ],
)
def test_values_that_are_wrong_are_named(tmp_path: Path, name: str, tensor: str, words: Any, message: str) -> None:
    case = next(case for case in CASES if case.name == name)
    folder, full = write_quantised(case, tmp_path / name, 3), f"model.layers.1.{tensor}"
    tensors = raw_tensors(case, 3)
    changed = tensors[full][1].copy()
    changed.reshape(-1)[5:6] = words
    write_safetensors(folder / case.file, tensors | {full: (tensors[full][0], changed)})
    with packed_sources(folder) as (sources, checkpoint):
        source = next(source for source in sources if full.startswith(source.name))
        with pytest.raises(CheckpointError, match=message):
            check_values(source, checkpoint, DType.FLOAT16)


@contextmanager
def packed_sources(folder: Path) -> Iterator[tuple[list[Source], Checkpoint]]:
    config = ModelFolder.open(folder).config
    with Checkpoint.open(folder) as checkpoint:
        specs = weight_specs(config, EngineConfig(), checkpoint)
        yield [source for spec in specs for source in spec.sources if source.packing], checkpoint


def test_pieces_do_not_overlap_and_a_large_source_goes_alone() -> None:
    packing = Packing("gptq", 128, symmetric=False)
    specs = [
        TensorSpec(name, shape, (Source(name, shape, packing),), Quantization(4, 128, symmetric=False))
        for name, shape in (("a", (64, 128)), ("b", (64, 128)), ("c", (4096, 4096)), ("d", (64, 128)))
    ]
    size = staging_bytes(specs)
    largest = max(staging_bytes([spec]) for spec in specs)
    found = [[piece.source.name for piece in wave] for wave in waves(specs, largest)]
    assert found == [["a", "b"], ["c"], ["d"]]
    assert [len(wave) for wave in waves(specs, size)] == [4]
    for wave in waves(specs, size):
        places = [(p.codes, p.scales, p.zeros, p.values) for p in wave]
        assert all(list(place) == sorted(set(place)) for place in places)
        assert all(a.end_byte <= b.codes for a, b in zip(wave, wave[1:], strict=False))
        assert all(place % 256 == 0 for place in sum(places, ()))
    assert staging_bytes([]) == 0 == len(list(waves([], 0)))


def test_blocks_that_become_16_bits_are_staged_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack, "ROUNDED_BYTES", 40_000)
    monkeypatch.setattr(repack, "LARGEST_STAGING_BYTES", 1 << 14)
    folder = ModelFolder.open(write_pair(tmp_path, "llama", lambda name: "Q6_K").gguf)
    with Checkpoint.open(folder.path) as checkpoint:
        specs = without_blocks(weight_specs(folder.config, EngineConfig(), checkpoint), {"embed_tokens"})
        embedding = next(spec for spec in specs if spec.name == "embed_tokens")
        stored, found = checkpoint.view(embedding.sources[0].name), []
        target = HostTarget(BASE + staging_bytes([embedding]), DType.BFLOAT16)
        for wave in waves([embedding], staging_bytes([embedding])):
            read_all([job for piece in wave for job in piece_reads(piece, checkpoint, BASE, target.dtype)], target)
            for piece in wave:
                assert piece.first_row == len(found)
                place = BASE + piece.codes
                rows = target.arena[place : place + piece.num_rows * piece.row_bytes].reshape(piece.num_rows, -1)
                found += list(rows.copy())
        np.testing.assert_array_equal(np.array(found), stored)
    assert staging_bytes([embedding]) < stored.nbytes
