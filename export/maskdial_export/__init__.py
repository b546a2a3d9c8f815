"""Turns Hugging Face checkpoints into maskdial bundles, and trains the starter models."""
