"""Brings weights into the arena: reads, uploads and repacks those of a checkpoint, or draws random ones."""
