"""From a model's name to arrays: hub or folder, checkpoint files, tensors packed for an executor."""
