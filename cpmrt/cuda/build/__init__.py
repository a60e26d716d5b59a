"""Kernel sources to cubins, through a cache, and cubins to kernels that launch by spec."""
