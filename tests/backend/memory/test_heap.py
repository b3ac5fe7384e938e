"""Pages of files that a process gives back."""

import mmap
import subprocess
import sys
from pathlib import Path

from varlen.processes import drop_library_pages

PAGES = 8


def resident(path):
    """Return the KiB of a file's pages that this process has mapped."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_pages_that_were_only_read_are_dropped_and_read_again(tmp_path):
    path = tmp_path / "read.so"
    path.write_bytes(bytes([7]) * PAGES * mmap.PAGESIZE)
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    assert pages[:] == path.read_bytes()
    assert resident(path)

    drop_library_pages()

    assert not resident(path)
    assert pages[:] == path.read_bytes()


def test_pages_that_were_changed_stay(tmp_path):
    path = tmp_path / "changed.so"
    path.write_bytes(bytes(PAGES * mmap.PAGESIZE))
    with path.open("rb") as file:
        kinds = mmap.PROT_READ | mmap.PROT_WRITE
        pages = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, kinds)
    pages[0] = 7

    drop_library_pages()

    assert pages[0] == 7


def test_pages_of_other_files_stay(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(PAGES * mmap.PAGESIZE))
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    assert not any(pages[:])

    drop_library_pages()

    assert resident(path)


def test_libraries_work_after_their_pages_were_dropped():
    code = "import numpy, varlen.processes as h; h.drop_library_pages(); print(numpy.ones(9).sum())"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout == "9.0\n"
