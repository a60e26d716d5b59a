"""Benchmarks: what a model costs on this device, against what its memory and arithmetic would allow."""
