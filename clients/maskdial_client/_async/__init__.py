"""The async client, written by hand; the sync client in ``_sync`` is generated from it.

One module per family of tasks holds their parameters, results and parsing, and a class with the
methods. ``python clients/generate_sync.py`` copies the classes named ``Async...`` to ``_sync``
without the ``async``; all else stays here and is imported from there.
"""
