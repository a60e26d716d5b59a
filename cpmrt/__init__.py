"""MiniCPM language models on NVIDIA GPUs: no torch, no compiler, whole steps as CUDA graphs.

    from cpmrt import LLM, SamplingParams
    print(LLM().generate("def read_lines(path):", SamplingParams(max_new_tokens=64)).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpmrt.async_llm import AsyncLLM, AsyncTextStream
    from cpmrt.caller_warnings import CpmrtWarning
    from cpmrt.config import SamplingParams
    from cpmrt.engine import GenerationStats
    from cpmrt.errors import (
        ArgumentError,
        BusyError,
        CheckpointError,
        ClosedError,
        ConfigError,
        ContextLengthError,
        CpmrtError,
        DeviceError,
        FormError,
        KernelCompileError,
        MaskError,
        MemoryPlanError,
        NoDeviceError,
        NonFiniteLogitsError,
        PrefixError,
        RequestError,
        UnsupportedModelError,
    )
    from cpmrt.executor import TokenLogprobs
    from cpmrt.generation import Completion, Piece
    from cpmrt.llm import LLM
    from cpmrt.sharing.text_stream import TextStream
    from cpmrt.tool_use.calls import Call

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ArgumentError",
    "AsyncLLM",
    "AsyncTextStream",
    "BusyError",
    "Call",
    "CheckpointError",
    "ClosedError",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "CpmrtError",
    "CpmrtWarning",
    "DeviceError",
    "FormError",
    "GenerationStats",
    "KernelCompileError",
    "MaskError",
    "MemoryPlanError",
    "NoDeviceError",
    "NonFiniteLogitsError",
    "Piece",
    "PrefixError",
    "RequestError",
    "SamplingParams",
    "TextStream",
    "TokenLogprobs",
    "UnsupportedModelError",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "AsyncTextStream": "async_llm",
    "Call": "tool_use.calls",
    "Completion": "generation",
    "CpmrtWarning": "caller_warnings",
    "GenerationStats": "engine",
    "Piece": "generation",
    "SamplingParams": "config",
    "TextStream": "sharing.text_stream",
    "TokenLogprobs": "executor",
}
"""The module of each public name. The errors are left out: they are all in `errors`."""


if not TYPE_CHECKING:  # a type checker shall know the names above and no others

    def __getattr__(name: str) -> Any:
        """Load the public names on first use, so that `import cpmrt` costs nothing."""
        if name not in __all__:
            raise AttributeError(f"module 'cpmrt' has no attribute {name!r}")
        from cpmrt.collector import no_collections

        with no_collections():
            return getattr(import_module(f"cpmrt.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
