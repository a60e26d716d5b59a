"""The parts of `tools/eval_quantized.py`, which measures what quantised weights cost in quality."""
