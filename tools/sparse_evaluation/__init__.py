"""The parts of `tools/eval_sparse.py`, which measures what sparse attention loses against dense attention."""
