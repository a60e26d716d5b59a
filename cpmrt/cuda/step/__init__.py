"""A step on the device: commands, rings, the step's own kernels, the forward in each shape."""
