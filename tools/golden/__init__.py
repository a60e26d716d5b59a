"""Golden files: cases, and Hugging Face transformers as the oracle."""
