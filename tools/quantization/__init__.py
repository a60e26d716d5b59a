"""What `quantize.py`, `gptq2marlin.py` and `eval_quantized.py` are made of. 4-bit weights, without torch.

Arrays are NumPy's or CuPy's: the same code runs on both, for NumPy's functions go to the library of their arguments.
"""
