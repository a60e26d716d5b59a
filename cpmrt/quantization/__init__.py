"""Makes 4-bit checkpoints, without torch: `cpmrt quantize`, and `cpmrt convert` between their layouts.

Arrays are NumPy's or CuPy's. The same code runs on both: NumPy's functions dispatch to the library of their arguments.
"""
