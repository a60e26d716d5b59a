"""Makes 4-bit checkpoints, without torch: `cpmrt quantize`, and `cpmrt convert` between their layouts.

Arrays are NumPy's or CuPy's: the same code runs on both, for NumPy's functions go to the library of their arguments.
"""
