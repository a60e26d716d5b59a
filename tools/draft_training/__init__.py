"""The parts of `tools/train_draft.py`: target, generation, draft, training, acceptance, files."""
