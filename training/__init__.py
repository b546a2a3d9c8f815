"""The recipe behind the shipped starter models, and the models that they are measured by."""
