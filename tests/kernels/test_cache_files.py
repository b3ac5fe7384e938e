"""Files of caches: no other user can change, replace or hold what is used."""

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.processes import NOBODY, as_user, needs_root
from varlen_kernels import cache_files
from varlen_kernels.cache_files import (
    CacheError,
    CacheFolder,
    LockedError,
    cache_home,
    folder_lock,
    holder_pid,
)

SECONDS = 20.0


@pytest.fixture
def folder(tmp_path):
    return CacheFolder(tmp_path / "home" / "varlen" / "code")


@pytest.fixture
def shared():
    """A folder in /tmp that every user can write."""
    path = Path("/tmp", f"varlen-test-{os.getpid()}")
    path.mkdir()
    path.chmod(0o777)
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_file_comes_back_and_is_only_for_this_user(folder):
    folder.write("a", b"content")

    assert folder.read("a", 7) == b"content"
    assert folder.names() == ["a"]
    assert mode(folder.path / "a") == 0o600
    assert {mode(each) for each in [folder.path, *folder.path.parents][:3]} == {0o700}
    folder.remove("a")
    folder.remove("a")
    assert folder.names() == []


def test_a_folder_that_is_absent_has_no_files(folder):
    assert folder.names() == []
    with pytest.raises(FileNotFoundError):
        folder.read("a", 7)
    assert not folder.path.exists()


def test_the_code_of_a_package_is_for_all_users(tmp_path):
    folder = CacheFolder(tmp_path / "code", of_package=True)
    old = os.umask(0o077)
    try:
        folder.write("a", b"content")
    finally:
        os.umask(old)

    assert mode(folder.path) == 0o755
    assert mode(folder.path / "a") == 0o644
    # as writable as the package itself
    (folder.path / "a").chmod(0o664)
    assert folder.read("a", 7) == b"content"


def test_a_file_of_too_many_bytes_is_refused(folder):
    folder.write("a", b"content")

    with pytest.raises(CacheError, match="more than 6 bytes"):
        folder.read("a", 6)


@pytest.mark.parametrize("name", ["link", "pipe", "folder", "hard link", "device"])
def test_what_is_no_file_of_its_own_is_not_read(folder, name, tmp_path):
    folder.write("other", b"content")
    path = folder.path / "a"
    if name == "link":
        path.symlink_to(folder.path / "other")
    elif name == "pipe":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    elif name == "hard link":
        path.hardlink_to(folder.path / "other")
    else:
        path.symlink_to("/dev/zero")

    with pytest.raises(CacheError):
        folder.read("a", 100)
    with pytest.raises(CacheError), folder.lock("a", 0):
        pass
    if name != "folder":
        # a write takes the name, and leaves the target as it is
        folder.write("a", b"new")
        assert folder.read("a", 100) == b"new"
    assert (folder.path / "other").read_bytes() == b"content"


def test_a_file_that_others_can_write_is_not_read(folder):
    folder.write("a", b"content")
    for rights in (0o602, 0o666):
        (folder.path / "a").chmod(rights)
        with pytest.raises(CacheError, match=f"chmod go-w {folder.path}/a"):
            folder.read("a", 100)


def test_a_folder_that_others_can_write_is_not_used(folder, monkeypatch):
    folder.write("a", b"content")
    # root's folders are checked by their owner only
    user = os.geteuid() or NOBODY
    if not os.geteuid():
        for each in (*list(folder.path.parents)[:2], folder.path, folder.path / "a"):
            os.chown(each, user, user)
        monkeypatch.setattr(os, "geteuid", lambda: user)
    for each in (folder.path, folder.path.parent):
        each.chmod(0o777)
        with pytest.raises(CacheError, match=f"other users can write to {each},"):
            folder.read("a", 100)
        # only the owner of a file can replace it there
        each.chmod(0o1777)
        assert folder.read("a", 100) == b"content"
        each.chmod(0o700)


def test_a_private_group_may_write(folder, monkeypatch):
    folder.write("a", b"content")
    (folder.path / "a").chmod(0o660)
    monkeypatch.setattr(cache_files, "_is_private", lambda group: False)
    with pytest.raises(CacheError, match="other users can write"):
        folder.read("a", 100)
    monkeypatch.setattr(cache_files, "_is_private", lambda group: True)

    assert folder.read("a", 100) == b"content"


@pytest.mark.parametrize("what", ["file", "folder", "folder above"])
@needs_root
def test_what_is_of_another_user_is_not_used(folder, what):
    folder.write("a", b"content")
    path = {
        "file": folder.path / "a",
        "folder": folder.path,
        "folder above": folder.path.parent,
    }[what]
    os.chown(path, NOBODY, NOBODY)

    with pytest.raises(CacheError, match=f"is of user {NOBODY}, so .* is not used"):
        folder.read("a", 100)
    if what != "file":
        with pytest.raises(CacheError, match="set XDG_CACHE_HOME"):
            folder.write("b", b"")
        assert not (folder.path / "b").exists()


@needs_root
def test_a_user_reads_files_of_root(shared):
    folder = CacheFolder(shared / "varlen")
    folder.write("a", b"content")
    folder.path.chmod(0o755)
    (folder.path / "a").chmod(0o644)

    assert as_user(NOBODY, lambda: folder.read("a", 100)) == "b'content'"
    assert "CacheError" in as_user(NOBODY, lambda: folder.write("a", b"mine"))


@needs_root
def test_a_link_of_another_user_is_not_followed(shared, tmp_path):
    """Root emptied files of its own through such links."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "measuring.lock").write_text("to be kept")
    shared.chmod(0o1777)
    done = as_user(NOBODY, lambda: (shared / "varlen").symlink_to(precious))
    assert done == "None"
    folder = CacheFolder(shared / "varlen")

    with pytest.raises(CacheError, match="a link of another user"):
        folder.write("a", b"content")
    with pytest.raises(CacheError, match="a link of another user"), folder.lock("a", 1):
        pass

    assert [path.name for path in precious.iterdir()] == ["measuring.lock"]
    assert (precious / "measuring.lock").read_text() == "to be kept"


def test_links_of_ones_own_are_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.cache").symlink_to("../disk", target_is_directory=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "home", target_is_directory=True)

    CacheFolder(tmp_path / "absolute/.cache/varlen").write("a", b"content")

    assert (tmp_path / "disk/varlen/a").read_bytes() == b"content"


def test_a_circle_of_links_ends(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with pytest.raises(CacheError, match="too many links"):
        CacheFolder(tmp_path / "a/varlen").write("a", b"content")


def test_a_relative_path_is_not_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CacheError, match="no absolute path"):
        CacheFolder(Path("cache")).write("a", b"content")


@needs_root
@pytest.mark.parametrize("home", ["/", "", "."])
def test_a_random_user_without_a_home_is_told_what_to_set(home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    said = as_user(1234567, lambda: CacheFolder(cache_home() / "varlen").make())

    assert "CacheError" in said
    assert "set XDG_CACHE_HOME" in said


@pytest.mark.parametrize(
    "cache, home, expected",
    [
        ("/scratch", "/home/me", "/scratch"),
        ("scratch", "/home/me", "/home/me/.cache"),
        ("", "/home/me", "/home/me/.cache"),
        ("", "/", "/.cache"),
    ],
)
def test_the_cache_is_where_the_xdg_specification_says(cache, home, expected, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", home)

    assert cache_home() == Path(expected)


def test_a_lock_is_for_one_at_a_time_and_ends_with_an_error(folder):
    order = []

    def second():
        with folder.lock("lock", SECONDS):
            order.append("second")

    thread = threading.Thread(target=second)

    def fail():
        with folder.lock("lock", 0):
            thread.start()
            time.sleep(0.2)
            order.append("first")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    thread.join()

    assert order == ["first", "second"]
    assert mode(folder.path / "lock") == 0o600


def test_a_lock_names_its_holder_and_ends_in_time(folder, monkeypatch):
    monkeypatch.setattr(cache_files, "_QUIET_SECONDS", 0.0)
    folder.make()
    program = (
        "import sys, pathlib; from varlen_kernels.cache_files import CacheFolder\n"
        "with CacheFolder(pathlib.Path(sys.argv[1])).lock('lock', 0): print(flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout.readline()
    said = []

    with pytest.raises(LockedError) as error, folder.lock("lock", 0.2, said.append):
        pass

    assert f"locked by process {other.pid} of user {os.geteuid()} ({sys.executable} -c" in str(
        error.value
    )
    assert "for more than 0.2 s" in str(error.value)
    assert len(said) == 1
    assert f"waiting at most 0.2 s for process {other.pid}" in said[0]
    other.communicate(b"\n")
    with folder.lock("lock", 0):
        pass


def test_a_folder_that_is_no_cache_can_be_locked(tmp_path):
    with folder_lock(tmp_path, 0):
        descriptor = os.open(tmp_path, os.O_RDONLY)
        assert holder_pid(descriptor) == os.getpid()
        with pytest.raises(LockedError, match=f"process {os.getpid()} "), folder_lock(tmp_path, 0):
            pass
    assert holder_pid(descriptor) is None
    os.close(descriptor)


def test_a_file_system_without_locks_is_no_cache(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(CacheError, match="/lock cannot be locked: No locks available"):
        with CacheFolder(tmp_path / "varlen").lock("lock", 0):
            pass


@needs_root
def test_another_user_cannot_hold_a_lock(shared):
    folder = CacheFolder(shared / "varlen")
    with folder.lock("lock", 0):
        pass

    def steal():
        return os.open(folder.path / "lock", os.O_RDONLY)

    assert "PermissionError" in as_user(NOBODY, steal)
    # also one of an older version
    folder.path.chmod(0o755)
    (folder.path / "lock").chmod(0o644)
    with folder.lock("lock", 0):
        pass
    assert "PermissionError" in as_user(NOBODY, steal)


def test_a_folder_of_endless_names_is_not_listed(folder, monkeypatch):
    monkeypatch.setattr(cache_files, "_MOST_NAMES", 2)
    for name in "abc":
        folder.write(name, b"")

    with pytest.raises(CacheError, match="more than 2 entries"):
        folder.names()


def test_readers_see_the_old_file_or_the_new_one(folder):
    contents = [bytes([number]) * 100_000 for number in range(2)]
    folder.write("a", contents[0])
    is_done = threading.Event()
    seen = set()

    def read():
        while not is_done.is_set():
            seen.add(folder.read("a", 100_000))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(50):
        folder.write("a", contents[number % 2])
    is_done.set()
    thread.join()

    assert seen <= {*contents}
    assert folder.names() == ["a"]
