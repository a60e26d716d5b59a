"""The parts of `tools/eval_drafts.py`: prompts, frequent tokens, measurement, table. No torch."""
