"""What the server adds: the same work over HTTP and through the bare engine."""
