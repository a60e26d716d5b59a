"""GGUF files in repositories of a hub: choosing the file that a name means, and fetching it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf_models as models
import pytest
from hub_server import HubServer
from hub_shell import Shell
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.errors import CheckpointError
from cpmrt.weights import hub as hubs
from cpmrt.weights.gguf.choice import gguf_labels, select_gguf

NAMES = [
    "M-Q4_K_M.gguf", "M-Q4_0.gguf", "M-f16.gguf", "M-Q8_0-00001-of-00002.gguf", "M-Q8_0-00002-of-00002.gguf",
    "other/M-Q6_K.gguf", "README.md", "M-IQ4_K_M.gguf", "M-Q5_0.GGUF",
]  # fmt: skip


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("Q4_K_M", ["M-Q4_K_M.gguf"]), ("q4_k_m", ["M-Q4_K_M.gguf"]), ("M-Q4_0.gguf", ["M-Q4_0.gguf"]),
        ("F16", ["M-f16.gguf"]), ("Q8_0", ["M-Q8_0-00001-of-00002.gguf", "M-Q8_0-00002-of-00002.gguf"]),
        ("M-Q8_0-00002-of-00002.gguf", ["M-Q8_0-00001-of-00002.gguf", "M-Q8_0-00002-of-00002.gguf"]),
        ("M-Q4_0", ["M-Q4_0.gguf"]), ("Q5_0", ["M-Q5_0.GGUF"]),
    ],
)  # fmt: skip
def test_a_file_is_meant_by_its_name_or_its_end(wish, expected):
    assert select_gguf(NAMES, wish, "org/m") == expected


def test_labels_are_the_shortest_ends_that_mean_one_file():
    labels = gguf_labels(NAMES)
    assert sorted(labels) == ["IQ4_K_M", "Q4_0", "Q4_K_M", "Q5_0", "Q8_0", "f16"]
    for label in labels:
        assert select_gguf(NAMES, label, "org/m")


BOTH = ["M-Q8_0.gguf", "M-Q8_0-00001-of-00002.gguf", "M-Q8_0-00002-of-00002.gguf", "x-M-Q8_0.gguf"]


@pytest.mark.parametrize(("wish", "expected"), [
    ("m-q8_0.gguf", BOTH[:1]), (BOTH[2], BOTH[1:3]), (BOTH[3], BOTH[3:]), ("x-M-Q8_0", BOTH[3:]),
])  # fmt: skip
def test_the_whole_name_of_a_file_means_no_other_one(wish, expected):
    assert select_gguf(BOTH, wish, "org/m") == expected
    assert gguf_labels(BOTH) == [BOTH[1], BOTH[0], "x-M-Q8_0"]
    with pytest.raises(CheckpointError, match="got 3 files that end so"):
        select_gguf(BOTH, "M-Q8_0", "org/m")


@given(st.sets(st.lists(st.sampled_from(["M", "q4", "Q4", "-", "."]), min_size=1, max_size=4).map("".join), max_size=6))
def test_every_label_means_its_file(stems):
    names = sorted({stem.lower(): f"{stem}.gguf" for stem in stems}.values())
    assert [select_gguf(names, label, "org/m") for label in gguf_labels(names)] == [[name] for name in names]


@pytest.mark.parametrize("wish", ["Q5_K_M", "M", "0", "README.md", "Q6_K", "other/M-Q6_K.gguf", "4_K_M"])
def test_what_means_no_file_or_several_is_refused_with_what_there_is(wish):
    with pytest.raises(CheckpointError) as found:
        select_gguf(NAMES, wish, "org/m")
    assert "org/m: GGUF file" in str(found.value) and "Q4_K_M" in str(found.value)


def test_a_split_model_without_all_parts_is_refused():
    with pytest.raises(CheckpointError, match="M-Q8_0-00002-of-00002.gguf"):
        select_gguf(NAMES[:4], "Q8_0", "org/m")


def test_names_of_repositories_with_a_file():
    found = hubs.repository("openbmb/MiniCPM4.1-8B-GGUF:Q4_K_M")
    assert (str(found), found.gguf) == ("openbmb/MiniCPM4.1-8B-GGUF", "Q4_K_M")
    found = hubs.repository("modelscope:OpenBMB/MiniCPM4-GGUF:a.gguf")
    assert (found.hub.prefix, found.name, found.gguf) == ("modelscope:", "OpenBMB/MiniCPM4-GGUF", "a.gguf")
    assert hubs.repository("org/name").gguf is None


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "repository"
    folder.mkdir()
    for kind in ("Q8_0", "Q4_0"):
        pair = models.write_pair(tmp_path, "llama", lambda name, kind=kind: kind, num_hidden_layers=1)
        pair.gguf.rename(folder / f"tiny-{kind}.gguf")
    with HubServer() as server:
        server.add("org/tiny-GGUF", folder)
        yield server


@pytest.mark.parametrize("prefix", ["", pytest.param("modelscope:", marks=pytest.mark.all)])
def test_a_file_of_a_hub_is_fetched_alone_and_runs(prefix, hub, tmp_path):
    shell, name = Shell(hub, tmp_path), f"{prefix}org/tiny-GGUF:q8_0"
    done = shell("pull", name)
    assert done.code == 0, done.err
    assert done.out.strip().endswith("tiny-Q8_0.gguf") and Path(done.out.strip()).stat().st_size > 1000
    assert not hub.downloads("tiny-Q4_0.gguf") and hub.downloads("tiny-Q8_0.gguf")
    count = len(hub.downloads("tiny-Q8_0.gguf"))
    line = ("generate", "-m", name, "hi", "--max-new-tokens", "2", "--executor", "reference")
    assert shell(*line, env={"HF_HUB_OFFLINE": "1"}).code == 0
    assert len(hub.downloads("tiny-Q8_0.gguf")) == count
    listing = shell("list").out
    assert "org/tiny-GGUF" in listing and "ready" in listing


@pytest.mark.all
def test_a_repository_of_gguf_files_alone_asks_for_one(hub, tmp_path):
    said = Shell(hub, tmp_path).refused("pull", "org/tiny-GGUF")
    assert "has GGUF files and no config.json" in said and "org/tiny-GGUF:Q" in said
    said = Shell(hub, tmp_path).refused("pull", "org/tiny-GGUF:Q5_K")
    assert "expected one of Q4_0, Q8_0" in said


@pytest.mark.all
def test_offline_without_the_file_is_an_error_that_says_so(hub, tmp_path):
    assert "offline" in Shell(hub, tmp_path).refused("pull", "org/tiny-GGUF:Q8_0", env={"HF_HUB_OFFLINE": "1"})
