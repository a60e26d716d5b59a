"""The sharing of one engine by any number of threads and event loops."""
