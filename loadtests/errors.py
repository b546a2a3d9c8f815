"""What stops a load test before it has anything to report."""


class LoadTestError(Exception):
    """The run cannot be made; the message says why."""
