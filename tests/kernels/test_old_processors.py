"""The library runs on processors without AVX: what several compilations share has none of it."""

import re
import shutil
import subprocess

import pytest

from maskdial.kernels.build import library_path

# Instructions of AVX and later have names that begin with v, but for two of the first processors.
_AVX = re.compile(r"v(?!err$|erw$)[a-z0-9]+")
_FUNCTION = re.compile(r"[0-9a-f]+ <(.*)>:")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="binutils are not installed")
def test_functions_that_processors_share_have_no_instructions_of_one_of_them() -> None:
    library = library_path()
    if not library.exists():
        pytest.skip("the kernels are not built")
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if "file format elf64-x86-64" not in listing:
        pytest.skip("not for x86-64")
    function, shared, own = "", set[str](), set[str]()
    for line in listing.splitlines():
        if begin := _FUNCTION.fullmatch(line):
            function = begin[1]
            continue
        _, _, instruction = line.partition("\t")
        if instruction and _AVX.fullmatch(instruction.split()[0]):
            # Each compilation has names without linkage for itself.
            (own if "(anonymous namespace)" in function else shared).add(function)
    assert shared == set()
    assert own  # or nothing has been looked at
