"""Keys and values of the beginning of prompts on disk, so that a long system prompt is computed once a machine."""
