"""Measures what quantised weights cost: `tools/eval_quantized.py`."""
