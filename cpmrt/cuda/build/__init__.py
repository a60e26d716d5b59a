"""Compiles kernel sources to cubins, through a cache, and launches their kernels by spec."""
