"""The same work by our engine, our server and other runtimes: ``python -m loadtests compare``."""
