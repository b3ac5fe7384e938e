"""Temporary folders of killed processes are removed, and never while one is in use."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from varlen_tools.scratch import remove_abandoned, scratch_folder

PREFIX = "varlen-test-"
_HOLDS = """
import subprocess, sys, time
from pathlib import Path
from varlen_tools.scratch import scratch_folder
with scratch_folder("varlen-test-", Path(sys.argv[1])) as folder:
    (folder.path / "file").touch()
    child = subprocess.Popen(["sleep", "60"], pass_fds=[folder.lock] * int(sys.argv[2]))
    print(folder.path, child.pid, flush=True)
    time.sleep(60)
"""


def test_a_folder_is_there_and_then_gone(tmp_path):
    with scratch_folder(PREFIX, tmp_path) as folder:
        (folder.path / "file").touch()
        assert folder.path.parent == tmp_path
        assert folder.path.stat().st_mode & 0o777 == 0o700

    assert list(tmp_path.iterdir()) == []


def test_without_a_parent_it_is_among_temporary_files():
    with scratch_folder(PREFIX) as folder:
        assert folder.path.parent == Path(tempfile.gettempdir())


@pytest.mark.parametrize("inherits", [0, 1])
def test_the_folder_of_a_killed_process_goes_once_no_process_has_its_lock(tmp_path, inherits):
    command = [sys.executable, "-c", _HOLDS, str(tmp_path), str(inherits)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path, child = process.stdout.readline().split()
        assert remove_abandoned(PREFIX, tmp_path) == []

        process.kill()
        process.wait()

    assert remove_abandoned(PREFIX, tmp_path) == ([] if inherits else [Path(path)])
    os.kill(int(child), 9)
    with scratch_folder(PREFIX, tmp_path) as folder:
        # the killed child may take a moment to end
        while not remove_abandoned(PREFIX, tmp_path) and Path(path).exists():
            pass
        assert list(tmp_path.iterdir()) == [folder.path]


def test_what_is_not_ours_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{PREFIX}old").mkdir()
    (tmp_path / f"{PREFIX}file.locked").touch()
    (tmp_path / f"{PREFIX}link.locked").symlink_to(elsewhere)
    (tmp_path / "other.locked").mkdir()

    assert remove_abandoned(PREFIX, tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_the_folder_of_another_user_stays(tmp_path):
    folder = tmp_path / f"{PREFIX}x.locked"
    folder.mkdir()
    os.chown(folder, 65534, 65534)

    assert remove_abandoned(PREFIX, tmp_path) == []
    assert folder.exists()


def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_again(
    tmp_path, monkeypatch
):
    made = []
    mkdtemp = tempfile.mkdtemp

    def removed_at_first(**arguments):
        made.append(mkdtemp(**arguments))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_first)
    with scratch_folder(PREFIX, tmp_path) as folder:
        assert [str(folder.path)] == made[1:]
