"""``python -m maskdial.kernels build``: builds the kernels for this machine."""

import argparse
import sys
from pathlib import Path

from maskdial.errors import ConfigError
from maskdial.kernels.build import FOLDER, build


def main() -> int:
    parser = argparse.ArgumentParser("python -m maskdial.kernels", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    builder = commands.add_parser("build", help="compile the library of kernels")
    builder.add_argument(
        "--output",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help="where to write it; default: beside the package, where the server looks for it",
    )
    builder.add_argument(
        "--sanitize",
        action="store_true",
        help="with AddressSanitizer and UndefinedBehaviorSanitizer, for tests",
    )
    options = parser.parse_args()
    try:
        print(build(options.output, sanitize=options.sanitize))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
