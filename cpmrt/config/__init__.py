"""Settings of models, engines and requests: frozen, and validated where they are made."""

from cpmrt.config.engine import EngineConfig
from cpmrt.config.model import ModelConfig
from cpmrt.config.quantization import WeightQuantization
from cpmrt.config.rope import RopeConfig
from cpmrt.config.sampling import MAX_LOGPROBS, Sampling, SamplingParams
from cpmrt.config.sampling_defaults import SamplingDefaults
from cpmrt.config.sparse import SparseConfig, SparseSetting, with_sparse_setting
from cpmrt.config.speculation import SpeculationConfig, TreeShape

__all__ = [
    "MAX_LOGPROBS",
    "EngineConfig",
    "ModelConfig",
    "RopeConfig",
    "Sampling",
    "SamplingDefaults",
    "SamplingParams",
    "SparseConfig",
    "SparseSetting",
    "SpeculationConfig",
    "TreeShape",
    "WeightQuantization",
    "with_sparse_setting",
]
