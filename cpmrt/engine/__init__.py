"""The engine: a state machine that turns requests into steps and results into tokens. It sees host integers only."""

from cpmrt.engine.engine import Engine
from cpmrt.engine.seeds import request_seed
from cpmrt.engine.sequence import Request, Sequence, ThinkingBudget
from cpmrt.engine.stats import GenerationStats

__all__ = ["Engine", "GenerationStats", "Request", "Sequence", "ThinkingBudget", "request_seed"]
