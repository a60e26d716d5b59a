"""How any number of threads and event loops share one engine."""
