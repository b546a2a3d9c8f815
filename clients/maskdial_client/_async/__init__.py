"""The async client, written by hand; the sync client in ``_sync`` is generated from it.

A module here holds a family of tasks: their parameters, results and parsing, and a class with their
methods. A new task goes into one of them, and a new result class also into the package's
``__init__``. Then ``python clients/generate_sync.py`` writes the sync twins.
"""
