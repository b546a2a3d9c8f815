"""Other projects' clients, unmodified, against a real server: `make test-clients`.

Each folder is an environment: `requirements.txt` pins what is installed into it. Each ``use_*.py``
is run there with the URL of the server and the name of its model, and fails by its exit status.
"""
