"""Launches kernels by their spec on one stream, or only notes what would have to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.build.spec import KernelSpec, macros_of
from cpmrt.cuda.driver.array import KernelArgument
from cpmrt.cuda.driver.launch import Dimensions, Kernel, launch, three
from cpmrt.cuda.driver.occupancy import check_all_resident

if TYPE_CHECKING:
    from cupy.cuda import Stream

    from cpmrt.cuda.build.spec import Constants

Module = tuple[str, Mapping[str, int]]


class Launcher:
    """Launches kernels on `stream`, which may be None if launches are only recorded.

    `use_pdl`: whether launches have dependent-launch edges, where the device has them.
    """

    def __init__(self, stream: Stream, modules: Modules, *, use_pdl: bool):
        self.stream, self.modules, self._use_pdl = stream, modules, use_pdl
        self._recorded: list[Module] | None = None
        self._resident: set[tuple[Kernel, Dimensions, Dimensions, int]] = set()
        self._held: Callable[[], None] | None = None

    def __call__(
        self,
        spec: KernelSpec,
        constants: Constants,
        grid: Dimensions,
        block: Dimensions,
        *args: KernelArgument,
        smem: int = 0,
        prefers_shared: bool = False,
    ) -> None:
        """Launch the kernel, compiled with these sizes; the other arguments are those of `launch`.

        If blocks of the kernel wait for each other, the first launch of a shape checks that all are resident at once.
        Raises as `launch` and `Modules.kernel` do, and DeviceError if they are not.
        """
        self.release()
        if self._recorded is not None:
            self._recorded.append((spec.file, macros_of(constants)))
            return
        kernel = self.modules.kernel(spec, constants)
        shape = kernel, grid, block, smem
        if spec.waits_across_blocks is not None and shape not in self._resident:
            if spec.waits_across_blocks(macros_of(constants)):
                kernel.allow_shared_bytes(smem)
                check_all_resident(kernel, prod(three(grid)), prod(three(block)), smem)
            self._resident.add(shape)
        launch(self.stream, kernel, grid, block, smem, args, pdl=self._use_pdl, prefers_shared=prefers_shared)

    def hold(self, release: Callable[[], None]) -> None:
        """Register `release`, to be called before anything else is launched: it launches what the caller holds back."""
        if self._held != release:
            self.release()
        self._held = release

    def release(self) -> None:
        """Launch what a caller of `hold` holds back, if there is anything."""
        if self._held is not None:
            release, self._held = self._held, None
            release()

    @property
    def is_recording(self) -> bool:
        """Whether operands may be stand-ins that have only shapes."""
        return self._recorded is not None

    @contextmanager
    def recording(self) -> Iterator[list[Module]]:
        """Collect, without repetition, the modules of everything that is launched meanwhile; nothing runs."""
        self.release()
        recorded: list[Module] = []
        self._recorded = recorded
        modules: list[Module] = []
        try:
            yield modules
        finally:
            self.release()  # still recording, so that nothing runs
            self._recorded = None
        modules.extend({(file, frozenset(sizes.items())): (file, sizes) for file, sizes in recorded}.values())
