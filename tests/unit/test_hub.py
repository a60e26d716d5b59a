"""Resolving a model's name to a folder: local paths, hub ids, and everything the hub library may raise."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.errors import CheckpointError, ConfigError
from cpmrt.weights.draft_folder import resolve as resolve_draft
from cpmrt.weights.hub import BUNDLED, resolve

RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404, text="", content=b"")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Stand-in for the hub's download: it records the call, then raises `error` or returns a folder with `files`."""
    hub: dict[str, Any] = {
        "files": ["config.json", "model.safetensors"],
        "error": None,
        "folder": tmp_path / "snapshot",
    }

    def snapshot_download(repo_id: str, **options: Any) -> str:
        hub.update(options, repo_id=repo_id)
        if hub["error"] is not None:
            raise hub["error"]
        hub["folder"].mkdir()
        for name in hub["files"]:
            (hub["folder"] / name).write_bytes(b"")
        return str(hub["folder"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return hub


def refusal(model: str | Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_local_folder_never_imports_the_hub_library(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cpmrt.weights.hub import resolve; "
        "folder = sys.argv[1]; assert resolve(folder) == resolve(Path(folder)) == Path(folder); "
        "assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])


def test_a_folder_named_like_a_repository_is_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: dict[str, Any]
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("org/name") == Path("org/name")
    assert resolve("./org/name") == Path("org/name")
    assert resolve("~/org/name") == tmp_path / "org" / "name"
    assert "repo_id" not in snapshot


@pytest.mark.parametrize("model", ["/no/such", "./no", "../no", "~/no", "~", "a/b/c", "a//b", Path("org/name")])
def test_an_absent_path_is_refused_without_the_hub(
    model: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "absent"))
    assert "expected a folder or a .gguf file, got nothing there" in refusal(model)
    assert "repo_id" not in snapshot


def test_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model.safetensors").write_bytes(b"")
    assert "expected a folder or a .gguf file, got a file" in refusal("org/model.safetensors")
    assert "repo_id" not in snapshot


NO_REPOSITORY = [
    "name",
    "org/",
    "-org/name",
    "org/name.",
    "org/na--me",
    "org/a..b",
    "org/name.git",
    "org/名",
    "org/name?x",
    "org/name@main",
    "hf:org/name",
    "modelscope:name",
    "modelscope:org/na me",
    "ModelScope:org/name",
]


@pytest.mark.parametrize(
    "model", [*NO_REPOSITORY, "", "org/na me", "org/n\n", "org/\0", "o" * 97 + "/name", "org/\ud800"]
)
def test_a_name_that_is_no_repository_is_refused_without_the_hub(model: str, snapshot: dict[str, Any]) -> None:
    message = refusal(model)
    assert "a hub id such as openbmb/MiniCPM4-0.5B" in message and message.isprintable()
    assert "repo_id" not in snapshot


@given(st.text(max_size=12))
def test_random_names_never_reach_further_than_the_hub_allows(model: str) -> None:
    try:
        resolve("./absent-folder/" + model)
    except CheckpointError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("model", ["openbmb/MiniCPM4-0.5B", "a/b", "Org_1/name_x.y-2"])
def test_a_repository_is_fetched(model: str, snapshot: dict[str, Any]) -> None:
    assert resolve(model, revision="main") == snapshot["folder"]
    assert (snapshot["repo_id"], snapshot["revision"]) == (model, "main")


REPOSITORY = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "README.md",
    "pytorch_model.bin",
    "model.gguf",
    "modeling_minicpm.py",
    "original/consolidated.safetensors",
    "onnx/config.json",
]


def test_only_files_that_are_read_are_fetched_before_the_weights(snapshot: dict[str, Any]) -> None:
    resolve("org/name", weights=False)
    fetched = [
        name
        for name in REPOSITORY
        if any(fnmatch.fnmatch(name, pattern) for pattern in snapshot["allow_patterns"])
        and not any(fnmatch.fnmatch(name, pattern) for pattern in snapshot["ignore_patterns"])
    ]
    assert fetched == [*REPOSITORY[:7], "model.safetensors.index.json"]


def test_a_plan_needs_no_safetensors(snapshot: dict[str, Any]) -> None:
    snapshot["files"] = ["config.json"]
    assert resolve("org/name", weights=False) == snapshot["folder"]


OFFLINE = errors.OfflineModeIsEnabled("HF_HUB_OFFLINE=1")


@pytest.mark.parametrize(
    "error, expected",
    [
        (errors.GatedRepoError("403\nx", response=RESPONSE), "org/name is gated; accept its terms"),
        (errors.RepositoryNotFoundError("404\nx", response=RESPONSE), "nor a repository of the hub"),
        (errors.RevisionNotFoundError("404\nx", response=RESPONSE), "org/name has no revision 'v1'"),
        (OFFLINE, "unset HF_HUB_OFFLINE"),
        (caused(errors.LocalEntryNotFoundError("not cached"), OFFLINE), "unset HF_HUB_OFFLINE"),
        (caused(errors.LocalEntryNotFoundError("x"), ConnectionError("no route")), "no route"),
        (errors.LocalEntryNotFoundError("x\ny"), "cannot be reached"),
        (errors.HfHubHTTPError("500\nServer Error", response=RESPONSE), "HfHubHTTPError: 500 Server Error"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (TimeoutError("timed out"), "TimeoutError: timed out"),
        (RuntimeError("proxy"), "could not be downloaded"),
    ],
)
def test_hub_failures_are_one_line(error: Exception, expected: str, snapshot: dict[str, Any]) -> None:
    snapshot["error"] = error
    message = refusal("org/name", revision="v1")
    assert expected in message and "org/name" in message and ";" in message


@pytest.mark.parametrize("endpoint", ["foo", "https:/foo", "ftp://foo"])
def test_an_endpoint_that_is_no_url_is_named(
    endpoint: str, snapshot: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    snapshot["error"] = ValueError("Request URL is missing a protocol")
    with pytest.raises(CheckpointError, match=f"^HF_ENDPOINT: expected the URL of a hub.*, got '{endpoint}'; set it"):
        resolve("org/name")


def test_an_interrupt_passes(snapshot: dict[str, Any]) -> None:
    snapshot["error"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name")


def test_a_revision_of_a_folder_is_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no revision"):
        resolve(tmp_path, revision="main")


def test_offline_mode_of_the_library_itself(tmp_path: Path) -> None:
    """The real hub library, offline with an empty cache, gives an error with advice and uses no network."""
    code = (
        "from cpmrt.weights.hub import resolve; from cpmrt.errors import CheckpointError\n"
        "try: resolve('org/name')\n"
        "except CheckpointError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert "org/name is not in the local cache" in done.stdout and "unset HF_HUB_OFFLINE" in done.stdout, done.stderr


def test_the_home_folder_of_a_name_that_no_user_can_have():
    for name in ("~\0x", "~\ud800"):
        with pytest.raises(CheckpointError, match="expected a folder"):
            resolve(name)
        with pytest.raises(CheckpointError, match="expected an existing folder"):
            resolve_draft(name, BUNDLED)
