"""Picks what runs a model: a GPU, or NumPy. Only what is picked is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from cpmrt.collector import no_collections
from cpmrt.config import EngineConfig
from cpmrt.errors import NoDeviceError

# `begin_device` runs before these are imported: that takes as long as the driver needs for what it begins.
if TYPE_CHECKING:
    from cpmrt.executor import Executor
    from cpmrt.memory.plan import MemoryPlan
    from cpmrt.weights.model_folder import ModelFolder

T = TypeVar("T")


class Assembly(Protocol):
    """What the module `assembly` of an executor offers."""

    def fetch_weights(self, folder: ModelFolder, settings: EngineConfig) -> None: ...
    def open_executor(self, folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]: ...


def begin_device(settings: EngineConfig) -> None:
    """Begin what takes long before `on_executor` can run and needs no model. Waits for nothing, raises nothing; without
    CuPy the device stays as it is."""
    if settings.executor != "reference" and find_spec("cupy") is not None:
        from cpmrt.cuda.driver.context import begin_context

        begin_context()


def on_executor(folder: ModelFolder, settings: EngineConfig, run: Callable[[Assembly], T]) -> T:
    """Call `run` with a GPU's assembly if one can be used and nothing else was asked for; with NumPy's by wish, or for
    the bundled model. Raises NoDeviceError.
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
            fix="use executor='reference' (--executor reference) to run it anyway, or see `cpmrt doctor`",
        ) from error


def _assembly(package: str) -> Assembly:
    with no_collections():
        return cast(Assembly, import_module(f"cpmrt.{package}.assembly"))
