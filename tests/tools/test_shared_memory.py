"""Shared memory that servers left behind: what no process uses is removed, and nothing else."""

import mmap
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.processes import is_gone
from varlen_tools.scratch import FOLDER, remove_unused, unused_regions

from .commands import run_varlen

# Maps a file, closes its descriptor, and waits for the end of its input.
_MAPS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    kept = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def region(folder: Path, size: int = 4096) -> Path:
    path = folder / f"triton_varlen_backend_shm_region_{uuid4()}"
    path.write_bytes(b"x" * size)
    return path


def test_a_region_that_no_process_uses_is_removed(folder: Path) -> None:
    left = [region(folder, 4096), region(folder, 8192)]

    assert {each.path: each.size for each in unused_regions(folder)} == {
        left[0]: 4096,
        left[1]: 8192,
    }
    assert {each.path for each in remove_unused(folder)} == set(left)
    assert list(folder.iterdir()) == []
    assert remove_unused(folder) == []


def test_a_region_that_another_process_maps_stays_until_its_end(folder: Path) -> None:
    used = region(folder)
    command = [sys.executable, "-c", _MAPS, str(used)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"

        assert remove_unused(folder) == []
        assert used.exists()

        process.kill()
        assert is_gone(process.pid)
    assert [each.path for each in remove_unused(folder)] == [used]


@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_a_region_that_is_open_or_mapped_here_stays(folder: Path, mode: str) -> None:
    used = region(folder)
    with used.open(mode) as file:
        assert unused_regions(folder) == []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            file.close()
            assert unused_regions(folder) == []
    assert len(unused_regions(folder)) == 1


def test_files_of_other_names_and_kinds_stay(folder: Path) -> None:
    name = f"triton_varlen_backend_shm_region_{uuid4()}"
    (folder / "sem.other").touch()
    (folder / f"{name}.old").touch()
    (folder / f"my_{name}").touch()
    (folder / name).symlink_to(folder / "sem.other")
    (folder / f"triton_python_backend_shm_region_{uuid4()}").mkdir()
    os.mkfifo(folder / f"triton_python_backend_shm_region_{uuid4()}")
    before = sorted(folder.iterdir())

    assert remove_unused(folder) == []
    assert sorted(folder.iterdir()) == before


def test_a_folder_that_is_missing_has_no_regions(folder: Path) -> None:
    assert unused_regions(folder / "missing") == []


def test_the_command_lists_and_removes(folder, monkeypatch) -> None:
    left = region(folder, 2000)
    monkeypatch.setattr("varlen_tools.scratch.unused_regions.__defaults__", (folder,))
    monkeypatch.setattr("varlen_tools.scratch.remove_unused.__defaults__", (folder,))

    before, after = run_varlen("clean"), run_varlen("clean", "--remove")

    listed = f"       2,000  {left}\n1 regions, 2,000 bytes"
    assert before.stdout == f"{listed}\n"
    assert after.stdout == f"{listed} removed\n"
    assert not left.exists()
    assert Path("/dev/shm") == FOLDER
