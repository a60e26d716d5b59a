"""Weights on their way into the arena: read, uploaded, repacked, or drawn at random."""
