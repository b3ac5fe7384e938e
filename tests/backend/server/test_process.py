"""The server's stub process: its watchdog, and returning freed memory to the system."""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from varlen import processes
from varlen_tools.local_server import _LOST_PROCESS

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture
def server_process(pb_utils, monkeypatch):
    """Return a fresh import of the module."""
    name = "varlen.server.process"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


@pytest.fixture
def parent_and_child():
    """Start a process with a child; return (the process, the child's id)."""
    parent = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 300 & echo $!; wait; exec sleep 300"],
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline())
    yield parent, child
    parent.stdout.close()
    parent.kill()
    parent.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


# Opens sockets of its own, closes the sockets of its parent, and says which are left.
CLOSE_SOCKETS = """
import socket, sys
from varlen.server.process import close_inherited_sockets

own, other = socket.socketpair()
close_inherited_sockets()
print(own.send(b"x"), flush=True)
sys.stdin.read()
"""


def run_script(script):
    """Return the arguments and the environment of a process that runs a script."""
    path = os.pathsep.join([str(FAKES), *sys.path])
    return {"args": [sys.executable, "-c", script], "env": {**os.environ, "PYTHONPATH": path}}


def test_sockets_that_came_through_exec_are_closed():
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(30)
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            **run_script(CLOSE_SOCKETS), stdin=pipe, stdout=pipe, pass_fds=[theirs.fileno()]
        )
        # before the child closes its copy, as a server does while a model loads
        theirs.close()
        with child:
            assert child.stdout.readline() == b"1\n"
            # no process has the other end any more
            assert ours.recv(1) == b""


def test_a_server_starts_for_a_time(server_process, monkeypatch, zombie):
    monkeypatch.setattr(os, "getppid", lambda: zombie.pid)
    assert server_process.server_starts()

    monkeypatch.setattr(server_process, "_START_SECONDS", -1.0)

    assert not server_process.server_starts()


@pytest.fixture
def watch(server_process):
    """Return a function that starts a watchdog for a process and its parent."""
    watchdogs = []

    def watch(parent, child, *more, proc="/proc"):
        script = server_process._WATCHDOG.replace("/proc", str(proc))
        arguments = map(str, (parent, child, *more))
        watchdogs.append(
            subprocess.Popen(
                ["/bin/sh", "-c", script, "varlen-watchdog", *arguments],
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return watchdogs[-1]

    yield watch
    for each in watchdogs:
        with each:
            each.kill()


def runs(pid):
    """Return whether a process exists and is not a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_the_watchdog_ends_a_process_whose_parent_was_killed(watch, parent_and_child):
    parent, child = parent_and_child
    watchdog = watch(parent.pid, child)
    assert runs(child)

    parent.kill()
    parent.wait()

    watchdog.wait(timeout=30)
    # a signal takes a moment
    deadline = time.monotonic() + 30
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(child)


@pytest.fixture
def zombie():
    """Return a killed process that its parent has not waited for."""
    process = subprocess.Popen(["/bin/sh", "-c", "sleep 300"])
    yield process
    process.kill()
    process.wait()


def test_the_watchdog_ends_beside_a_zombie(watch, zombie):
    watchdog = watch(os.getpid(), zombie.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        watchdog.wait(timeout=2)

    zombie.kill()

    assert watchdog.wait(timeout=30) == 0
    assert Path(f"/proc/{zombie.pid}").exists()


def test_the_watchdog_spares_another_process_of_the_same_id(watch, tmp_path):
    # a fake /proc, since a test cannot make the system reuse an id
    process = tmp_path / "77"
    process.mkdir()
    stat = "77 (a name (1) of it) S {parent} " + "0 " * 17 + "{started} 0 0\n"
    (process / "stat").write_text(stat.format(parent=5, started=1000))
    watchdog = watch(5, 77, proc=tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        watchdog.wait(timeout=2)

    # another parent: a watchdog that ignored the start time would kill the process
    (process / "next").write_text(stat.format(parent=6, started=2000))
    (process / "next").rename(process / "stat")

    assert watchdog.wait(timeout=30) == 0


def test_a_process_that_cannot_end_by_itself_is_ended():
    script = (
        "from varlen.server import process as s; s._END_SECONDS = 1; s.end_process_soon()\n"
        "while True: pass"
    )

    ended = subprocess.run(**run_script(script), timeout=30, check=False)

    assert ended.returncode == -signal.SIGALRM


def test_the_watchdog_ends_with_the_process_it_watches(watch, parent_and_child):
    parent, child = parent_and_child
    watchdog = watch(parent.pid, child)

    os.kill(child, signal.SIGKILL)

    # its parent waits for it
    assert watchdog.wait(timeout=30) is not None
    assert not runs(child)


@pytest.fixture
def region(tmp_path):
    """Return a file that stands for the shared memory of a process."""
    path = tmp_path / "region of it"
    path.touch()
    return path


def test_the_watchdog_removes_shared_memory_once_the_server_has_ended(
    watch, parent_and_child, region
):
    parent, child = parent_and_child
    watchdog = watch(parent.pid, child, "minilm_0", region)

    os.kill(child, signal.SIGKILL)

    said = watchdog.stderr.readline()
    assert said == f"varlen: the process of minilm_0 {_LOST_PROCESS}\n"
    with pytest.raises(subprocess.TimeoutExpired):
        watchdog.wait(timeout=1.5)
    assert region.exists(), "the server still has it mapped"
    parent.kill()
    parent.wait()

    assert watchdog.wait(timeout=30) == 0
    assert not region.exists()


def test_the_watchdog_removes_shared_memory_of_a_process_that_it_ends(
    watch, parent_and_child, region
):
    parent, child = parent_and_child
    watchdog = watch(parent.pid, child, "minilm_0", region)
    parent.kill()
    parent.wait()

    assert watchdog.wait(timeout=30) == 0
    assert not region.exists()
    assert watchdog.stderr.read() == ""


def test_a_model_process_that_ends_stops_the_server_if_its_operator_says_so(
    watch, parent_and_child, region
):
    parent, child = parent_and_child
    watch(parent.pid, child, "minilm_0", region, "1")

    os.kill(child, signal.SIGKILL)

    assert parent.wait(timeout=30) == -signal.SIGTERM


@pytest.mark.parametrize("value", ["", "0"])
def test_a_server_stays_if_its_operator_has_switched_that_off(
    watch, parent_and_child, region, value
):
    parent, child = parent_and_child
    watchdog = watch(parent.pid, child, "minilm_0", region, value)

    os.kill(child, signal.SIGKILL)

    assert watchdog.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        parent.wait(timeout=1)


# Start of the scripts that run in a new process.
PRELUDE = """
import ctypes, resource, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from varlen.processes import return_large_memory
from varlen.server.process import MemoryTrimmer

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
"""

# Frees large blocks between small ones that stay, which a heap cannot return.
FREE_LARGE_BLOCKS = """
return_large_memory()
libc.free(libc.malloc(4 << 20))
before, blocks = resident(), []
for _ in range(32):
    blocks.append(libc.malloc(2 << 20))
    ctypes.memset(blocks[-1], 1, 2 << 20)
    ctypes.memset(libc.malloc(100_000), 1, 100_000)
assert resident() - before > 64 << 20
for block in blocks:
    libc.free(block)
print(resident() - before)
"""

# Frees small blocks between a few that stay, and keeps working.
FREE_SMALL_BLOCKS = """
before, blocks = resident(), []
for _ in range(1000):
    blocks.append(libc.malloc(60_000))
    ctypes.memset(blocks[-1], 1, 60_000)
for number, block in enumerate(blocks):
    if number % 20:
        libc.free(block)
assert resident() - before > 32 << 20, "nothing keeps freed blocks back, so the test shows nothing"
trimmer = MemoryTrimmer()
deadline = time.monotonic() + 30
while resident() - before > 16 << 20 and time.monotonic() < deadline:
    sum(range(10_000))
trimmer.close()
print(resident() - before)
"""


@pytest.mark.parametrize(
    "script, most_megabytes",
    [(FREE_LARGE_BLOCKS, 8), (FREE_SMALL_BLOCKS, 16)],
    ids=["large", "small"],
)
def test_blocks_that_are_freed_go_back_to_the_system(script, most_megabytes):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(FAKES)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert int(done.stdout) < most_megabytes << 20


def test_a_c_library_without_these_calls_is_left_alone(server_process, monkeypatch):
    monkeypatch.setattr(processes, "_C_LIBRARY", object())

    processes.return_large_memory()
    server_process.MemoryTrimmer().close()
