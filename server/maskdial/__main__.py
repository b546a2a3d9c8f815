"""The `maskdial` command, and what a server needs before its modules are loaded."""

import os
import signal
import sys

_STANDARD_DESCRIPTORS = (0, 1, 2)


def main() -> int:
    """Runs the command line and returns its exit code."""
    if sys.argv[1:2] == ["serve"]:
        _open_standard_descriptors()
        if hasattr(signal, "SIGHUP"):
            # It means that files are to be read again, and they have not been read yet.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.argv[1:2] == ["export"]:
        # Read when NumPy is imported. Its idle threads wait in loops, which on a busy machine takes
        # several times as long as the export's own products.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from maskdial import cli

    return cli.main()


def _open_standard_descriptors() -> None:
    """Opens those that were closed, or sockets and files of the server would take their place."""
    for descriptor in _STANDARD_DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the system gives the lowest number that is free


if __name__ == "__main__":
    sys.exit(main())
