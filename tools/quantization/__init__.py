"""The parts of `tools/quantize.py`, `tools/gptq2marlin.py` and `tools/eval_quantized.py`: W4A16 without torch.

Arrays are NumPy's or CuPy's: the same code runs on both, for NumPy's functions go to the library of their arguments.
"""
