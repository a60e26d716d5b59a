"""Picks the executor of a model, that of a GPU or that of NumPy, and imports only the one that is picked."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from cpmrt.collector import no_collections
from cpmrt.config import EngineConfig
from cpmrt.errors import NoDeviceError

# Imported for types only: `begin_device` must run before these, whose import takes as long as what it begins.
if TYPE_CHECKING:
    from cpmrt.executor import Executor
    from cpmrt.memory.plan import MemoryPlan
    from cpmrt.weights.model_folder import ModelFolder

T = TypeVar("T")


class Assembly(Protocol):
    """The functions that the module `assembly` of each executor offers."""

    def fetch_weights(self, folder: ModelFolder, settings: EngineConfig) -> None: ...
    def open_executor(self, folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]: ...


def begin_device(settings: EngineConfig) -> None:
    """Begin to create the GPU's context in a thread: it takes long, `on_executor` needs it, and it needs no model.

    Waits for nothing and raises nothing. Does nothing for the NumPy executor, and without CuPy.
    """
    if settings.executor != "reference" and find_spec("cupy") is not None:
        from cpmrt.cuda.driver.context import begin_context

        begin_context()


def on_executor(folder: ModelFolder, settings: EngineConfig, run: Callable[[Assembly], T]) -> T:
    """Return what `run` makes of the assembly of the executor that `settings` ask for.

    "auto" is a GPU if one can be used; else NumPy, but for the bundled model only. Raises NoDeviceError.
    """
    if settings.executor == "reference":
        return run(_assembly("reference"))
    try:
        return run(_assembly("cuda"))
    except NoDeviceError as error:
        if settings.executor == "cuda":
            raise
        if folder.is_bundled:
            return run(_assembly("reference"))
        raise NoDeviceError(
            f"{error.what}, and the NumPy executor is about a hundred times slower",
            actual=error.actual,
            fix="use executor='reference' to run it anyway, or see `cpmrt doctor`",
        ) from error


def _assembly(package: str) -> Assembly:
    with no_collections():
        return cast(Assembly, import_module(f"cpmrt.{package}.assembly"))
