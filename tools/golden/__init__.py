"""The parts of `tools/make_golden.py`: the cases of golden files, and oracles, most of them on transformers."""
