"""The models in the caches of the hubs, whole or not: lists them with their sizes and states, and removes a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cpmrt.errors import CheckpointError, CpmrtError
from cpmrt.weights.draft_folder import method_of
from cpmrt.weights.gguf.names import has_gguf_suffix
from cpmrt.weights.hub import HUBS
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.repository import CachedRepository, Hub, has_weights


class State(Enum):
    """Whether cpmrt can run a cached model: alone, as the draft of another one, or once the rest of it is fetched."""

    READY = "ready"
    DRAFT = "draft"
    INCOMPLETE = "incomplete"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache of a hub, under the name that loads it."""

    hub: Hub
    repository: CachedRepository

    @property
    def name(self) -> str:
        return f"{self.hub.prefix}{self.repository.name}"

    @property
    def path(self) -> Path:
        """The folder of everything that the cache holds of the model."""
        return self.repository.path

    @property
    def num_bytes(self) -> int:
        return self.repository.num_bytes

    @property
    def modified(self) -> float:
        """The time of the model's last change, in seconds since 1970."""
        return self.repository.modified

    @property
    def state(self) -> State:
        """The best state that a revision of the model has, in the order of `State`."""
        states = [_state(folder) for folder in self.repository.folders]
        return next((state for state in State if state in states), State.INCOMPLETE)

    def remove(self) -> None:
        """Remove the model from the cache. Raises CheckpointError where the folder cannot be written."""
        try:
            self.hub.remove(self.repository)
        except OSError as error:
            raise CheckpointError(
                f"{self.name} cannot be removed: {error}", fix=f"remove the folder {self.path} as its owner"
            ) from error


def cached_models() -> Iterator[CachedModel]:
    """Yield the models in the caches of all hubs."""
    for hub in HUBS:
        for repository in hub.cached():
            yield CachedModel(hub, repository)


def _state(folder: Path) -> State:
    if not (folder / "config.json").exists() and (files := _gguf_files(folder)):
        return next((state for file in files if (state := _state(file)) is State.READY), State.UNSUPPORTED)
    try:
        is_whole = has_weights(folder)
        if is_whole and method_of(str(folder), folder) != "model":
            return State.DRAFT
        ModelFolder.open(folder, weights=False)
    except CpmrtError:
        return State.UNSUPPORTED
    return State.READY if is_whole else State.INCOMPLETE


def _gguf_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if has_gguf_suffix(path.name))
