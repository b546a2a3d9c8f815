"""Open-loop load tests over real HTTP. Run with ``python -m loadtests run``; see README.md."""
