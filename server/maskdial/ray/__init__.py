"""Replicas of the server on a Ray cluster, as a Ray Serve application.

`maskdial.ray:app` is what a Serve configuration imports.
"""

from maskdial.ray.application import app

__all__ = ["app"]
