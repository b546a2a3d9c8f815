"""Other projects' clients, unmodified, against a real server: `make test-clients`.

They are installed into an environment of their own, at the versions in `requirements.txt`. Each
``use_*.py`` is run there with the URL of the server and the name of its model, and fails by its
exit status.
"""
