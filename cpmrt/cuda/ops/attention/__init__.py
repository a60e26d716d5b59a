"""Attention over KV pages: of decode rows, tree rows and prefill chunks."""
