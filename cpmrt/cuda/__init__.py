"""The CUDA executor. CuPy and NVIDIA's Python packages are imported here and nowhere else, when they are needed."""
