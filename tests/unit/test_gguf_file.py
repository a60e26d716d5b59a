"""The GGUF reader: contents are read unchanged, and malformed files are refused by name."""

import shutil
from pathlib import Path

import gguf_files as files
import numpy as np
import pytest

from cpmrt.errors import CheckpointError, CpmrtError
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.gguf import header
from cpmrt.weights.gguf.file import GgufFile, GgufModel
from cpmrt.weights.gguf.header import MAX_COUNT

DAMAGES = list(files.damages())


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return files.good().write(tmp_path_factory.mktemp("gguf") / "good.gguf")


def test_keys_of_every_type(good):
    with GgufFile.open(good) as file:
        found = dict(file.metadata)
    assert found["general.architecture"] == "llama" and found["a.text"] == "größer ✓"
    assert found["a.truth"] is True and found["a.strings"] == ["a", "", "ü"]
    assert found["a.numbers"].tolist() == [1, -2, 3] and found["a.truths"].tolist() == [True, False]
    assert found["a.empty"].tolist() == []
    numbers = {files.U8: 200, files.I8: -3, files.U16: 60000, files.I16: -300, files.U32: 4_000_000_000}
    numbers |= {files.I32: -70_000, files.F32: 0.5, files.U64: 2**63, files.I64: -9, files.F64: 1e300}
    assert {kind: found[f"a.number{kind}"] for kind in numbers} == numbers


def test_tensors_are_views_with_the_shape_of_the_matrix(good):
    with GgufFile.open(good) as file:
        shapes = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
        assert shapes == {
            "plain.weight": ("F32", (3,)), "half.weight": ("F16", (2, 5)), "words.weight": ("BF16", (2, 2, 2)),
            "blocks.weight": ("Q8_0", (2, 64)), "super.weight": ("Q4_K", (1, 512)),
        }  # fmt: skip
        assert file.view("half.weight").tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        assert file.view("words.weight").dtype == np.uint16
        for tensor in files.good().tensors:
            view = file.view(tensor.name)
            assert view.tobytes() == tensor.data and not view.flags.writeable
        assert file.view("blocks.weight").shape == (2, 68) and file.view("super.weight").shape == (1, 288)
        with pytest.raises(CheckpointError, match="no tensor 'other'"):
            file.view("other")


def test_a_view_outlives_the_file_and_a_closed_file_says_so(good):
    with GgufFile.open(good) as file:
        view = file.view("plain.weight")
    assert view.tolist() == [0, 1, 2]
    del view
    file.close()
    with pytest.raises(CheckpointError, match="is closed"):
        file.view("plain.weight")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_versions_and_alignments(tmp_path, version, alignment):
    content = files.good()
    content.version, content.alignment = version, alignment
    content.keys[1] = ("general.alignment", files.value(files.U32, alignment))
    with GgufFile.open(content.write(tmp_path / "a.gguf")) as file:
        assert file.version == version
        assert all(entry.offset % alignment == 0 for entry in file.entries.values())
        assert file.view("plain.weight").tolist() == [0, 1, 2]


def test_padding_behind_the_last_tensor_is_no_fault(tmp_path):
    content = files.good()
    content.end = b"\0" * (-len(content.encoded()) % 32)
    with GgufFile.open(content.write(tmp_path / "a.gguf")) as file:
        assert len(file.entries) == 5


def test_there_are_many_damages():
    assert len(DAMAGES) >= 60 and len({damage.name for damage in DAMAGES}) == len(DAMAGES)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "bad.gguf"
    path.write_bytes(files.damaged(damage))
    with pytest.raises(CpmrtError) as found:
        GgufFile.open(path)
    message = str(found.value)
    assert damage.words in message and str(path) in message and "\n" not in message and len(message) < 1000


def test_a_refused_file_is_not_left_in_memory(tmp_path):
    content = files.good()
    content.version = 3 << 24
    path = content.write(tmp_path / "bad.gguf")
    with pytest.raises(CpmrtError) as found:
        GgufFile.open(path)
    assert "big-endian" in str(found.value) and is_mapped(tmp_path) in (False, None)


def test_flipped_bytes_of_the_header_do_no_harm(tmp_path):
    """A file with a flipped bit in its header either opens or raises an error of cpmrt that names the file."""
    raw, path = files.good().encoded(), tmp_path / "bad.gguf"
    random, opened = np.random.default_rng(0), 0
    for place in random.integers(0, len(raw) - 500, 400):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            with GgufFile.open(path) as file:
                opened += all(file.view(name).nbytes == entry.nbytes for name, entry in file.entries.items())
        except CpmrtError as error:
            assert str(path) in str(error)
    assert opened > 20, "changes that do no harm are among them"


def test_more_keys_than_any_model_has_are_refused_unread(tmp_path):
    content, path = files.Content(), tmp_path / "many.gguf"
    for count in (MAX_COUNT, MAX_COUNT + 1):
        content.keys = [(f"key.{number}", files.value(files.U8, 1)) for number in range(count)]
        content.write(path)
        if count == MAX_COUNT:
            with GgufFile.open(path) as file:
                assert len(file.metadata) == count
    with pytest.raises(CheckpointError, match="the number of keys: expected at most 65536, got 65537"):
        GgufFile.open(path)


def test_what_reaches_the_limits_of_the_format_is_read(tmp_path):
    content = files.good()
    content.keys = [("k" * 65535, files.value(files.U8, 1)), ("general.alignment", files.value(files.U32, 1 << 20))]
    content.tensors = [files.Described("n" * 64, (2, 1, 1, 3), 0, bytes(24)), *content.tensors[1:]]
    content.alignment = 1 << 20
    with GgufFile.open(content.write(tmp_path / "a.gguf")) as file:
        assert file.metadata["k" * 65535] == 1 and file.view("n" * 64).shape == (2, 1, 1, 3)


def test_a_file_without_tensors_may_end_with_its_last_key(tmp_path):
    content = files.Content([("a", files.value(files.ARRAY, (files.STRING, ["x"] * 9 + [""])))])
    content.alignment = 1
    path = content.write(tmp_path / "a.gguf")
    with GgufFile.open(path) as file:
        assert file.metadata["a"] == ["x"] * 9 + [""] and not file.entries
    content.keys = [("a", files.value(files.ARRAY, (files.STRING, ["x", "yz"])))]
    path.write_bytes(content.encoded()[:-1])
    with pytest.raises(CheckpointError, match="'a', string 1 reaches beyond the file"):
        GgufFile.open(path)
    content.keys = [("a", files.value(files.ARRAY, (files.U64, [1, 2])))]
    with GgufFile.open(content.write(path)) as file:
        assert file.metadata["a"].tolist() == [1, 2]


def test_a_header_has_a_longest_length(tmp_path, monkeypatch):
    path = files.good().write(tmp_path / "a.gguf")
    with GgufFile.open(path) as file:
        first = min(entry.offset for entry in file.entries.values())
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", first)
    GgufFile.open(path).close()
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", first - 40)
    with pytest.raises(CheckpointError, match="the header is too long: expected at most"):
        GgufFile.open(path)


def test_a_file_that_is_not_there_and_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        GgufFile.open(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        GgufFile.open(tmp_path)


@pytest.mark.parametrize("suffix", [".gguf", ".GGUF"])
def test_parts_of_a_split_model_open_from_any_of_them(tmp_path, suffix):
    paths = [path.rename(path.with_suffix(suffix)) for path in files.split(tmp_path)]
    for path in paths:
        with GgufModel.open(path) as model:
            assert [part.path for part in model.parts] == paths
            assert model.metadata["general.architecture"] == "llama"
            for tensor in files.good().tensors:
                assert model.view(tensor.name).tobytes() == tensor.data
            assert len(model.entries) == 5


def test_a_closed_model_has_closed_all_parts(tmp_path):
    with GgufModel.open(files.split(tmp_path)[0]) as model:
        with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.gguf has no tensor 'other'"):
            model.view("other")
        assert is_mapped(tmp_path) in (True, None)
    for tensor in files.good().tensors:
        with pytest.raises(CheckpointError, match="is closed"):
            model.view(tensor.name)
    assert is_mapped(tmp_path) in (False, None)


def is_mapped(folder):
    """Tell whether a file of a folder is in the memory of this process; None where the system does not say."""
    maps = Path("/proc/self/maps")
    return str(folder) in maps.read_text() if maps.exists() else None


def test_a_model_that_does_not_run_leaves_nothing_mapped(tmp_path):
    path = files.good().write(tmp_path / "a.gguf")
    with pytest.raises(CpmrtError) as caught:
        Checkpoint.open(path)
    assert caught.value.__traceback__ is not None and not is_mapped(tmp_path)


@pytest.mark.parametrize("said", [
    {}, {"split.no": 0}, {"split.no": 0, "split.count": 0}, {"split.count": 1},
    {"split.count": 0, "split.tensors.count": 0},
])  # fmt: skip
def test_a_file_that_was_never_split_is_its_only_part(tmp_path, said):
    content = files.good()
    content.keys += [(key, files.value(files.U16, number)) for key, number in said.items()]
    with GgufModel.open(content.write(tmp_path / "a.gguf")) as model:
        assert len(model.parts) == 1 and len(model.entries) == 5


def test_parts_need_not_say_how_many_tensors_there_are(tmp_path):
    paths, tensors = files.split(tmp_path), files.good().tensors
    for number, own in enumerate((tensors[:2], tensors[2:3], tensors[3:])):
        said = [("split.no", files.value(files.U16, number)), ("split.count", files.value(files.U16, 3))]
        files.Content(said, own).write(paths[number])
    with GgufModel.open(paths[0]) as model:
        assert len(model.parts) == 3 and len(model.entries) == 5


@pytest.mark.parametrize("end", ["00001-of-00000", "00000-of-00000", "00000-of-00002", "00003-of-00002"])
def test_a_name_that_numbers_no_part_is_that_of_a_whole_model(tmp_path, end):
    files.split(tmp_path)
    path = tmp_path / f"model-{end}.gguf"
    files.good().write(path)
    with GgufModel.open(path) as model:
        assert [part.path for part in model.parts] == [path] and len(model.entries) == 5


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "model-00002-of-00003.gguf does not exist"),
        ("swapped", "'split.no': expected 0, got 1"),
        ("renamed", "'split.count': expected 2, got 3"),
        ("doubled", "is in two files"),
        ("counted", "'split.tensors.count': expected 5, as the files have, got 6"),
        ("alone", "'split.count': expected 1, got 3"),
        ("unsaid", "'split.no': expected 0, got None"),
        ("denied", "'split.count': expected 3, got 0"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, fault, words):
    paths = files.split(tmp_path)
    opened = paths[0]
    if fault == "missing":
        paths[1].unlink()
    elif fault == "swapped":
        paths[1].rename(paths[0])
    elif fault == "renamed":
        opened = tmp_path / "model-00001-of-00002.gguf"
        shutil.copy(paths[0], opened)
        shutil.copy(paths[1], tmp_path / "model-00002-of-00002.gguf")
    elif fault == "alone":
        opened = paths[0].rename(tmp_path / "model.gguf")
    elif fault in ("unsaid", "denied"):
        content, said = files.good(), ("split.no", "split.count") if fault == "denied" else ()
        content.keys += [(key, files.value(files.U16, 0)) for key in said]
        content.write(paths[0])
    else:
        _rewrite(paths, fault)
    with pytest.raises(CheckpointError) as found:
        GgufModel.open(opened)
    assert words in str(found.value) and is_mapped(tmp_path) in (False, None)


def _rewrite(paths, fault):
    content = files.good()
    total, tensors = (6, content.tensors[:2]) if fault == "counted" else (5, content.tensors[:3])
    own = [("split.no", files.value(files.U16, 0)), ("split.count", files.value(files.U16, 3))]
    own.append(("split.tensors.count", files.value(files.I32, total)))
    files.Content([*content.keys, *own], tensors).write(paths[0])
