"""maskdial: an inference server for masked and causal language models."""

__version__ = "0.1.0"
