"""Everything between a model's name and arrays of weights: hub, folders, checkpoint files, formats, packing."""
