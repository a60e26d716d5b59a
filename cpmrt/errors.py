"""Errors a user can meet. Each says what is wrong, what was expected, what was found and what to change."""

from __future__ import annotations


class CpmrtError(Exception):
    """What is wrong, on one line.

    `expected`, `actual` and `fix` are kept as attributes, so that a caller can act on them without parsing text.
    """

    def __init__(self, what: str, *, expected: object = None, actual: object = None, fix: str | None = None):
        self.what, self.expected, self.actual, self.fix = what, expected, actual, fix
        found = [f"expected {expected}"] * (expected is not None) + [f"got {actual}"] * (actual is not None)
        message = what + (": " + ", ".join(found) if found else "") + (f"; {fix}" if fix else "")
        super().__init__(" ".join(message.split()))


class ConfigError(CpmrtError):
    """A model or engine setting is missing, malformed or contradicts another."""


class CheckpointError(CpmrtError):
    """A checkpoint file is absent, corrupt, or does not hold what its config promises."""


class UnsupportedModelError(CpmrtError):
    """The checkpoint is well-formed but needs something this runtime does not implement."""


class RequestError(CpmrtError):
    """One request (prompt, messages or sampling parameters) is not valid; the engine is unharmed."""


class ContextLengthError(RequestError):
    """Prompt plus new tokens do not fit the context."""


class MemoryPlanError(CpmrtError):
    """The planned buffers do not fit the memory budget."""


class KernelCompileError(CpmrtError):
    """NVRTC refused a kernel source, or what it needs to compile is not installed."""


class DeviceError(CpmrtError):
    """The GPU failed while it ran; the process's context is lost."""


class NoDeviceError(CpmrtError):
    """No usable device for the executor that was asked for."""
