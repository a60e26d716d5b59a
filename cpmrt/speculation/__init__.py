"""Speculative decoding as a procedure, without arrays: each executor brings the operations that it is made of."""
