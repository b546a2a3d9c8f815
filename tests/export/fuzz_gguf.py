"""Mutations of GGUF files: every one is read, or refused with one sentence, in bounded memory.

By hand, 10,000 of a file: ``python -m tests.export.fuzz_gguf model.gguf 10000``, and a seed.
"""

import resource
import struct
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from maskdial_export.checkpoint.gguf.convert import convert
from maskdial_export.checkpoint.gguf.file import read_file
from maskdial_export.errors import ExportError

MAX_SECONDS = 20.0  # a guard against hanging, not a measurement
_EXTREME = (0, 1, 7, 8, 9, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)


def mutate(content: bytes, random: Random, header: int) -> bytes:
    """Changes bytes, numbers or the length of a file, mostly in its header."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        place = random.randrange(*random.choice(_regions(header, len(changed))))
        kind = random.randrange(6)
        if kind == 0:
            changed[place] = random.randrange(256)
        elif kind == 1:
            changed[place] ^= 1 << random.randrange(8)
        elif kind == 2:
            number = struct.pack("<Q", random.choice(_EXTREME))[: random.choice((4, 8))]
            changed[place : place + len(number)] = number
        elif kind == 3:
            del changed[place : place + random.randrange(1, 64)]
        elif kind == 4:
            other = random.randrange(4, header)
            changed[place:place] = changed[other : other + random.randrange(1, 64)]
        else:
            del changed[random.randrange(len(changed)) :]
        if len(changed) <= header:
            break
    return bytes(changed)


def _regions(header: int, length: int) -> tuple[tuple[int, int], ...]:
    """Where a change may be: settings, the table of tensors, the whole header, anywhere."""
    return (4, min(2000, header)), (max(header - 4000, 4), header), (4, header), (4, length)


def fuzz(path: Path, count: int, seed: int = 0) -> tuple[int, int]:
    """Converts mutations of a file; returns how many were read and how many refused.

    Raises:
        AssertionError: one took too long.
        Exception: one was not refused in the usual way.
    """
    content = path.read_bytes()
    header = len(content) - _num_data_bytes(path)
    random = Random(seed)
    read = 0
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "changed.gguf"
        for number in range(count):
            changed.unlink(missing_ok=True)  # the last one is still mapped
            changed.write_bytes(mutate(content, random, header))
            start = time.monotonic()
            try:
                with tempfile.TemporaryDirectory() as made:
                    convert([changed], Path(made))
                read += 1
            except ExportError as error:
                message = error.message
            except Exception as error:
                raise AssertionError(f"mutation {number} of seed {seed}") from error
            else:
                message = ""
            assert "\n" not in message, (number, message)
            assert time.monotonic() - start < MAX_SECONDS, number
    return read, count - read


def _num_data_bytes(path: Path) -> int:
    tensors = read_file(path).tensors.values()
    return path.stat().st_size - min((each.offset for each in tensors), default=0)


if __name__ == "__main__":
    file, mutations, *seeds = sys.argv[1:]
    results = fuzz(Path(file), int(mutations), *map(int, seeds))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{results[0]} read, {results[1]} refused, {peak} MiB at most")
