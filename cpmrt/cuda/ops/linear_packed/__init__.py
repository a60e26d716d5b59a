"""Products with weights packed in 2, 4 or 8 bits."""
