"""The parts of `tools/make_demo_model.py`: corpus, tokenizer, network, training, evaluation, export."""
