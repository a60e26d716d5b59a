"""Drafting on the device: the draft's passes, the tree's kernels, whole speculative steps."""
