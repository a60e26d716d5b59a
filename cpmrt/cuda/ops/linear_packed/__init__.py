"""Products with weights packed in 4 or 8 bits."""
