"""Launches by kernel name on one stream; or, while recording, only a list of what would have to be compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.driver.launch import Dimensions, launch

Module = tuple[str, Mapping[str, int]]


class Launcher:
    """`use_pdl`: with dependent-launch edges, where the device has them."""

    def __init__(self, stream: Any, modules: Modules, *, use_pdl: bool):
        self.stream, self.modules, self._use_pdl = stream, modules, use_pdl
        self._recorded: list[Module] | None = None

    def __call__(
        self,
        file: str,
        name: str,
        constants: Mapping[str, int],
        grid: Dimensions,
        block: int,
        *args: Any,
        smem: int = 0,
        prefers_shared: bool = False,
    ) -> None:
        """Launch kernel `name` of `file`, compiled with these sizes; `prefers_shared` as `launch.launch`."""
        if self._recorded is not None:
            self._recorded.append((file, constants))
            return
        kernel = self.modules.kernel(file, name, constants)
        launch(self.stream, kernel, grid, block, smem, args, pdl=self._use_pdl, prefers_shared=prefers_shared)

    @property
    def is_recording(self) -> bool:
        """Whether operands may be stand-ins that have only shapes."""
        return self._recorded is not None

    @contextmanager
    def recording(self) -> Iterator[list[Module]]:
        """Collects, without repetition, the modules of everything that is launched meanwhile; nothing runs."""
        self._recorded = []
        modules: list[Module] = []
        try:
            yield modules
            modules.extend({(file, frozenset(sizes.items())): (file, sizes) for file, sizes in self._recorded}.values())
        finally:
            self._recorded = None
