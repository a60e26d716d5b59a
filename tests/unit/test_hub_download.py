"""Downloads from a local test hub: the files requested, their order, and the files left behind by failures.

The commands run as processes of their own: the hub libraries read their environment when they are imported.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hub_server import COMMIT, HubServer
from hub_shell import Shell
from terminal import shown_on_terminal
from tiny_checkpoint import write_checkpoint

from cpmrt.cli.main import main
from cpmrt.errors import CheckpointError
from cpmrt.weights.repository import Repository

BOTH = ("org/tiny", "modelscope:org/tiny")
NAMES = ("org/tiny", pytest.param("modelscope:org/tiny", marks=pytest.mark.all))
LARGE = 24 << 20
"""Bytes of a file whose download is cut off: more than two of the 10 MB pieces that Hugging Face's library writes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def hub(model: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add("org/tiny", model)
        yield server


def rare(*values: object) -> object:
    """Return a case that runs in the second tier only."""
    return pytest.param(*values, marks=pytest.mark.all)


@pytest.fixture
def shell(hub: HubServer, tmp_path: Path) -> Shell:
    return Shell(hub, tmp_path / "home")


def with_large_weights(hub: HubServer) -> bytes:
    """Make the model's weights too large to arrive in one piece and return them; no test here opens them."""
    content = np.random.default_rng(1).bytes(LARGE)
    hub.repositories["org/tiny"]["model.safetensors"] = content
    return content


@pytest.mark.parametrize("name", BOTH)
def test_a_model_is_pulled_listed_run_offline_and_removed(name: str, hub: HubServer, shell: Shell, model: Path) -> None:
    pulled = shell("pull", name)
    folder = Path(pulled.out.strip())
    assert pulled.code == 0 and folder.is_relative_to(shell.home)
    assert f"{name}: downloading 1 file of weights, 451.98 KiB, to " in pulled.err
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (model / file).read_bytes()
    listed = json.loads(shell("list", "--json").out)["models"]
    assert [(row["name"], row["state"]) for row in listed] == [(name, "ready")]
    assert listed[0]["bytes"] >= sum(path.stat().st_size for path in model.iterdir())
    generate = ("generate", "abc", "-m", name, "--executor", "reference", "--max-new-tokens", "3", "--quiet")
    num_requests = len(hub.requests)
    done = shell(*generate, env={"HF_HUB_OFFLINE": "1"})
    assert done.code == 0 and done.out.strip() and done.err == "" and len(hub.requests) == num_requests
    assert shell(*generate).out == done.out and len(hub.downloads("model.safetensors")) == 1
    assert shell("rm", name).out.startswith(f"removed {name}: 45")
    assert shell("list", "--json").out == '{"models": [], "total_bytes": 0}\n'
    assert not list(shell.home.rglob("*.safetensors"))


@pytest.mark.parametrize("damage", ["blob", "revision"])
def test_a_model_that_lost_a_part_is_listed_completed_and_removed(shell: Shell, model: Path, damage: str) -> None:
    folder = Path(shell("pull", "org/tiny").out.strip())
    if damage == "blob":
        (folder / "tokenizer.json").resolve().unlink()
    else:
        (folder.parents[1] / "refs" / "other").write_text("0" * 40)
    (listed,) = json.loads(shell("list", "--json").out)["models"]
    weights = (model / "model.safetensors").stat().st_size
    assert listed["name"] == "org/tiny" and listed["bytes"] > weights
    assert listed["state"] == ("incomplete" if damage == "blob" else "ready")
    assert shell("pull", "org/tiny").code == 0 and (folder / "tokenizer.json").exists()
    removed = shell("rm", "org/tiny")
    assert removed.out.startswith("removed org/tiny: 4") and removed.err == ""
    assert not folder.parents[1].exists()


GENERATE = ("generate", "abc", "--executor", "reference", "-m")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "files, line, says",
    [
        rare({"config.json": b'{"architectures": ["FalconForCausalLM"]}'}, ("pull",), "FalconForCausalLM"),
        ({"config.json": b'{"architectures": ["FalconForCausalLM"]}'}, GENERATE, "FalconForCausalLM"),
        rare({"tokenizer.json": b"{}"}, GENERATE, "tokenizer.json"),
        ({}, ("generate", "abc", "--executor", "reference", "--memory-budget", "1KiB", "-m"), "at most 1.00 KiB"),
        ({}, ("generate", "abc", "-m"), "a hundred times slower"),
        rare({}, ("generate", "abc", "--executor", "cuda", "-m"), ""),
    ],
    ids=["unsupported-pull", "unsupported", "tokenizer", "memory", "slow", "no-gpu"],
)
def test_no_weights_are_fetched_for_a_model_that_cannot_run(
    name: str, files: dict[str, bytes], line: tuple[str, ...], says: str, hub: HubServer, shell: Shell
) -> None:
    hub.repositories["org/tiny"] |= files
    assert says in shell.refused(*line, name)
    assert hub.downloads("config.json") and not hub.downloads("model.safetensors")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it has just got its name
        return 0


def half_way(name: str, hub: HubServer, shell: Shell) -> subprocess.Popen[str]:
    """Start to pull a model with large weights whose end the hub holds back; return when 10 MiB of them are here."""
    hub.wait = threading.Event()
    hub.cuts["model.safetensors"] = LARGE - 1000
    process = shell.start("pull", name)
    until = time.monotonic() + 30
    while sum(map(_size, shell.home.rglob("*.incomplete"))) < 10 << 20:
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("name", BOTH)
def test_an_interrupted_download_goes_on_where_it_ended(name: str, hub: HubServer, shell: Shell) -> None:
    content, process = with_large_weights(hub), half_way(name, hub, shell)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.wait.set()
    assert not list(shell.home.rglob("*.safetensors"))
    (listed,) = json.loads(shell("list", "--json").out)["models"]
    assert listed["state"] == "incomplete" and listed["bytes"] > 10 << 20
    pulled = shell("pull", name)
    assert pulled.code == 0 and " MiB are here, to " in pulled.err, pulled.err
    (path,) = shell.home.rglob("model.safetensors")
    assert path.read_bytes() == content
    first, second = hub.downloads("model.safetensors")
    assert first == "" and int(second.removeprefix("bytes=").rstrip("-").partition("-")[0]) >= 10 << 20
    assert not list(shell.home.rglob("*.incomplete"))


@pytest.mark.all
@pytest.mark.parametrize("name", BOTH)
def test_ctrl_c_ends_a_download_at_once(name: str, hub: HubServer, shell: Shell) -> None:
    with_large_weights(hub)
    process = half_way(name, hub, shell)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and out == "" and "Traceback" not in err, err


@pytest.mark.all
def test_a_connection_that_breaks_is_taken_up_again(hub: HubServer, shell: Shell) -> None:
    content = with_large_weights(hub)
    hub.cuts["model.safetensors"] = LARGE - 1000
    folder = Path(shell("pull", "org/tiny").out.strip())
    assert (folder / "model.safetensors").read_bytes() == content


def test_what_arrives_damaged_is_not_kept(hub: HubServer, shell: Shell) -> None:
    hub.damaged.add("model.safetensors")
    assert "model.safetensors arrived damaged" in shell.refused("pull", "org/tiny")
    assert not list(shell.home.rglob("*.safetensors")) and not list(shell.home.rglob("*.incomplete"))
    hub.damaged.clear()
    assert shell("pull", "org/tiny").code == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "files, says",
    [
        ({"pytorch_model.bin": b"x"}, "org/tiny has no safetensors weights"),
        rare({"model.gguf": b"x"}, "name the .gguf file itself"),
        rare({"a.safetensors": b"x", "b.safetensors": b"x"}, "several safetensors files"),
        rare({"original/model.safetensors": b"x"}, "has no safetensors weights"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "1.safetensors"}}'},
         "names files that the repository lacks: got 1.safetensors"),
        rare({"model.safetensors.index.json": b'{"weight_map": {"a": "../1.safetensors"}}'}, "a plain name"),
    ],
    ids=["pickles", "gguf", "two-files", "subfolder", "shard-missing", "shard-elsewhere"],
)  # fmt: skip
def test_a_repository_without_weights_to_read_is_refused(
    name: str, files: dict[str, bytes], says: str, hub: HubServer, shell: Shell
) -> None:
    hub.repositories["org/tiny"] |= files
    del hub.repositories["org/tiny"]["model.safetensors"]
    assert says in shell.refused("pull", name)
    assert not hub.downloads("pytorch_model.bin") and not hub.downloads("1.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_only_the_files_of_the_index_are_fetched(name: str, hub: HubServer, shell: Shell) -> None:
    weights = {f"{number}.safetensors": bytes([number]) * 9 for number in (1, 2, 3)}
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    files = ("additional_chat_templates/tool_use.jinja", "freq_1/a.json", "original/config.json")
    beside = dict.fromkeys(files, b"{}")
    hub.repositories["org/tiny"] |= weights | beside | {"model.safetensors.index.json": json.dumps(index).encode()}
    pulled = shell("pull", name)
    folder = Path(pulled.out.strip())
    assert [(folder / file).exists() for file in beside] == [True, False, False]
    assert "downloading 2 files of weights, 18 B, to" in pulled.err
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_a_token_opens_what_is_closed(name: str, hub: HubServer, shell: Shell) -> None:
    hub.token = "secret"
    token = "HF_TOKEN" if name == "org/tiny" else "MODELSCOPE_API_TOKEN"
    refused = shell.refused("pull", name)
    assert token in refused and "secret" not in refused
    assert shell("pull", name, env={token: "secret"}).code == 0


@pytest.mark.all
def test_what_an_interrupted_download_left_is_not_trusted(hub: HubServer, shell: Shell, model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    shell("plan", "org/tiny")  # fetches the config
    repository = shell.home / ".cache" / "huggingface" / "hub" / "models--org--tiny"
    partial = repository / "blobs" / f"{hashlib.sha256(content).hexdigest()}.incomplete"
    partial.write_bytes(b"x" * 1000)
    assert "arrived damaged" in shell.refused("pull", "org/tiny") and not partial.exists()
    partial.write_bytes(b"x" * (len(content) + 1))
    folder = Path(shell("pull", "org/tiny").out.strip())
    assert (folder / "model.safetensors").read_bytes() == content


def test_the_token_goes_to_the_hub_and_not_to_its_store(hub: HubServer, shell: Shell, model: Path) -> None:
    hub.token = "secret"
    with HubServer() as store:
        store.add("org/tiny", model)
        hub.store = store.url
        folder = Path(shell("pull", "org/tiny", env={"HF_TOKEN": "secret"}).out.strip())
        assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        assert store.downloads("model.safetensors") == [""] and not any(store.authorizations)


def set_gated(hub: HubServer) -> None:
    hub.gated = True


def set_broken(hub: HubServer) -> None:
    hub.status = 500


def set_as_it_is(hub: HubServer) -> None:
    """Leave the hub as it is."""


@pytest.mark.parametrize(
    "line, change, says",
    [
        (["org/absent"], set_as_it_is, "neither a local folder nor a repository of the hub"),
        rare(["org/tiny", "--revision", "v9"], set_as_it_is, "org/tiny has no revision 'v9'"),
        (["org/tiny"], set_gated, "org/tiny is gated; accept its terms at http://127.0.0.1"),
        rare(["org/tiny"], set_broken, "500"),
        (["modelscope:org/absent"], set_as_it_is, "modelscope:org/absent is no repository of ModelScope"),
        rare(["modelscope:org/tiny", "--revision", "v9"], set_as_it_is, "at revision 'v9' is no repository"),
    ],
    ids=["absent", "revision", "gated", "broken", "modelscope-absent", "modelscope-revision"],
)
def test_what_the_hub_refuses_is_said(line: list[str], change: object, says: str, hub: HubServer, shell: Shell) -> None:
    change(hub)
    error = shell.refused("pull", *line)
    assert says in error and not list(shell.home.rglob("*.safetensors")), error


@pytest.mark.parametrize("name", BOTH)
def test_a_name_that_could_not_be_fetched_is_not_listed(name: str, hub: HubServer, shell: Shell) -> None:
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    shell.refused("plan", name, env=unreachable)
    assert json.loads(shell("list", "--json").out)["models"] == []


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
def test_offline_says_what_is_missing(name: str, hub: HubServer, shell: Shell) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    absent = shell.refused("pull", name, env=offline)
    assert f"{name} is not in the local cache" in absent and "unset HF_HUB_OFFLINE" in absent and not hub.requests
    assert shell("plan", name).code == 0  # fetches the config
    num_requests = len(hub.requests)
    assert shell("plan", name, env=offline).code == 0
    no_weights = shell.refused(*GENERATE, name, env=offline)
    assert "or not all of it, and offline mode is on" in no_weights and len(hub.requests) == num_requests


@pytest.mark.all
@pytest.mark.parametrize("name", BOTH)
def test_an_unreachable_hub_is_named_and_the_cache_used(name: str, shell: Shell) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    error = shell.refused("pull", name, env=nowhere)
    assert "cannot be reached" in error and "Connection refused" in error
    shell("pull", name)
    assert shell(*GENERATE, name, "--max-new-tokens", "1", env=nowhere).code == 0


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_takes_no_more_is_named(name: str, hub: HubServer, shell: Shell) -> None:
    """A full disk, here a limit on file sizes, gives an error that names the cache's variable, and a later pull
    succeeds."""
    with_large_weights(hub)
    limit = 12 << 20
    error = shell.refused(
        "pull", name, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    assert "could not be written to the cache: File too large" in error and "then try again" in error
    assert ("HF_HOME" if name == "org/tiny" else "MODELSCOPE_CACHE") in error
    assert not list(shell.home.rglob("*.safetensors"))
    assert shell("pull", name).code == 0


def test_a_download_that_the_disk_cannot_hold_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Offer:
        prefix = ""
        cache_variable = "HF_HOME"

        def sizes(self, *arguments: object) -> dict[str, int]:
            return {"model.safetensors": 15 << 30}

        def download(self, *arguments: object) -> None:
            pytest.fail("it has begun")

    folder = tmp_path / "models--org--m" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 30))
    repository = Repository(Offer(), "org/m")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"no room .*: expected 15.00 GiB free, got 3.00 GiB.*HF_HOME"):
        repository.fetch_weights(folder)
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    with (blobs / "x.incomplete").open("wb") as partial:
        partial.truncate(14 << 30)
    monkeypatch.setattr(Offer, "download", lambda *arguments: (folder / "model.safetensors").touch())
    repository.fetch_weights(folder)  # the rest of 1 GiB has room


def test_a_draft_is_not_fetched_for_a_target_that_cannot_run(hub: HubServer, shell: Shell) -> None:
    hub.repositories["org/draft"] = dict(hub.repositories["org/tiny"])
    shell.refused("generate", "abc", "-m", "org/tiny", "--draft", "org/draft")
    assert not any("draft" in path for _, path, _ in hub.requests)


@pytest.mark.all
def test_a_draft_is_pulled_though_it_runs_alone_nowhere(hub: HubServer, shell: Shell) -> None:
    hub.repositories["org/tiny"]["config.json"] = b'{"architectures": ["EagleForCausalLM"]}'
    assert "EagleForCausalLM" in shell.refused("pull", "org/tiny")
    assert shell("pull", "org/tiny", "--draft").code == 0


def test_a_folder_is_not_pulled(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", str(model)]) == 2
    assert "is a folder of this machine: there is nothing to download" in capsys.readouterr().err


def test_without_its_client_modelscope_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cpmrt.installation.missing_packages", lambda extra: ["modelscope_hub"])
    assert main(["pull", "modelscope:org/tiny"]) == 1
    error = capsys.readouterr().err
    assert "models from ModelScope need modelscope_hub; " in error and "pip install " in error


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_sees_the_progress_of_the_weights_alone(name: str, shell: Shell) -> None:
    def shown(*line: str) -> str:
        text, exit_code = shown_on_terminal(
            lambda terminal: shell.start(*line, stdout=terminal, stderr=terminal), columns=100
        )
        assert exit_code == 0, text
        return text.decode()

    first = shown("pull", name)
    assert "downloading 1 file of weights" in first and "model.safetensors" in first and "%|" in first
    assert "config.json" not in first and "Fetching" not in first
    again = shown("pull", name)
    assert again.count("\n") == 1 and again.strip().startswith(str(shell.home))
    assert "downloading" not in shown("generate", "x", "-m", name, "--executor", "reference", "--max-new-tokens", "1")
    shell("rm", name)
    assert shown("pull", name, "--quiet").count("\n") == 1
