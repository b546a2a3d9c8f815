"""The causal engine measured in this process. Run with ``python -m loadtests engine``."""
