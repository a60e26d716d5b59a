"""GGUF: one file that holds a model's settings, tokenizer and weights, mostly in blocks of few bits."""
