"""The driver: devices, launches, graphs, host memory, cuBLASLt."""
