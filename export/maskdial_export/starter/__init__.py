"""The recipe behind the shipped starter models: masked, sentiment and causal."""
