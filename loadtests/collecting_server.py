"""The server's command line, in a process that collects its garbage on SIGUSR1.

`loadtests.server` runs the file itself, so that the server need not find this package.
"""

import ctypes
import gc
import signal
import sys
import threading
from typing import Any


def _collect(resident_bytes: Any) -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    while True:
        signal.sigwait({signal.SIGUSR1})
        trim(0)
        before = resident_bytes()
        gc.collect()
        trim(0)
        sys.stderr.write(f"collected: {before} {resident_bytes()}\n")


if __name__ == "__main__":
    # Threads inherit the mask, so it comes before the imports that start some.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    import psutil

    from maskdial.cli import main

    process = psutil.Process()
    arguments = (lambda: process.memory_info().rss,)
    threading.Thread(target=_collect, args=arguments, daemon=True).start()
    sys.exit(main())
