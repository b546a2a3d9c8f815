"""What batches of like length gain, in this process: ``python -m loadtests batching``."""
