"""Trains the starter models, and the models that they are compared with; see CONTRIBUTING.md."""
