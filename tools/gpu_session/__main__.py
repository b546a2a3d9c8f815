"""``python -m tools.gpu_session``: see the package."""

import argparse
import os
import sys
from pathlib import Path

from tools.gpu_session import pack, steps
from tools.gpu_session.session import ENDED, Session
from tools.image_locks import ROOT


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all steps have passed, 1 if one has not, 3 if some have not been run yet."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_session", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    preparing = commands.add_parser("prepare", help="pack what the machine lacks into parts")
    preparing.add_argument(
        "--have",
        type=Path,
        metavar="FILE",
        help="names of packages that the machine has, a line each",
    )
    preparing.add_argument(
        "--cuda-arch", type=int, default=90, help="its compute capability, such as 90 for 9.0"
    )
    preparing.add_argument("--part-mib", type=int, default=36, help="size of a part")
    running = commands.add_parser("run", help="run the steps that have not ended")
    running.add_argument(
        "--provider", choices=("cuda", "cpu"), default="cuda", help="cpu: try it on tiny models"
    )
    running.add_argument(
        "--seconds", type=float, default=570.0, metavar="S", help="of all steps in this run"
    )
    running.add_argument(
        "--copy-to", type=Path, metavar="FOLDER", help="of results, after each step"
    )
    running.add_argument(
        "--installed", action="store_true", help="use what is installed, not the parts"
    )
    running.add_argument("--work", type=Path, default=pack.WORK, help="keeps models and results")
    args = parser.parse_args(arguments)
    if args.command == "prepare":
        have = [] if args.have is None else args.have.read_text(encoding="utf-8").split()
        for path in pack.prepare(have, args.cuda_arch, args.part_mib * 2**20):
            print(f"{path} {path.stat().st_size:,}")
        return 0
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    paths = [ROOT / each for each in ("server", "export", "clients", ".")]
    if not args.installed:
        pack.unpack()
        paths.insert(0, pack.SITE)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    os.chdir(ROOT)
    planned = list(steps.steps(args.provider, args.work.resolve()))
    session = Session(args.work, args.copy_to)
    session.run(planned, args.seconds)
    states = [session.results.get(step.name, {}).get("state") for step in planned]
    if any(state not in ENDED for state in states):
        return 3
    return int(any(state != "passed" for state in states))


if __name__ == "__main__":
    sys.exit(main())
