"""MiniCPM language models on NVIDIA GPUs: no torch, no compiler, whole steps as CUDA graphs.

    from cpmrt import LLM, SamplingParams
    print(LLM().generate("def read_lines(path):", SamplingParams(max_new_tokens=64)).text)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpmrt.config import SamplingParams
    from cpmrt.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that `import cpmrt` costs nothing."""
    if name == "LLM":
        from cpmrt.llm import LLM

        return LLM
    if name == "SamplingParams":
        from cpmrt.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'cpmrt' has no attribute {name!r}")
