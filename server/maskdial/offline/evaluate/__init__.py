"""``maskdial eval``: how well bundles do on tasks, as they are served."""
