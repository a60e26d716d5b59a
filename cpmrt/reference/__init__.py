"""The NumPy executor: the living definition of every op, and the default where there is no GPU."""
