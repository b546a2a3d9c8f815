"""``python -m maskdial_client.exactness URL``, where only the client is installed."""

import argparse
import sys

from maskdial_client.exactness.command import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="exactness", description="Asks a server the same questions in many ways."
    )
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
