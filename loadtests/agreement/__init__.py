"""Greedy texts of a bundle and of torch, token by token."""
