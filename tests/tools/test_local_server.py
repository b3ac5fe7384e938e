"""A local server starts, answers, reports why it did not start, and always ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from varlen_tools.local_server import (
    _LOST_LOCK,
    _LOST_PROCESS,
    LOOPBACK,
    START_ATTEMPTS,
    LocalServer,
    ServerError,
    find_command,
    free_port,
    reserved_port,
)

pytestmark = pytest.mark.server


def test_serves_on_loopback_with_this_environments_python(repository, backends):
    with LocalServer(repository, arguments=[f"--backend-directory={backends}"]) as server:
        server.wait_ready()

        sent = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert np.array_equal(echo(server, sent), sent)
        assert f"identity: {sys.prefix}\n" in server.log()
        for port in (server.http_port, server.grpc_port, server.metrics_port):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        log_file, pid = server.log_file, server.pid
        assert server.stop() == 0

    assert not server.is_running
    assert not is_alive(pid)
    assert not log_file.exists()


def test_a_signal_while_it_starts_leaves_no_process(repository, tmp_path):
    command = tmp_path / "tritonserver"
    command.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    command.chmod(0o755)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt), LocalServer(repository, command=command):
        pass
    signal.signal(signal.SIGALRM, before)

    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    "says, does",
    [
        (_LOST_LOCK, "kill -ABRT $$"),
        (f"varlen: the process of m_0 {_LOST_PROCESS}", "exec sleep 60"),
    ],
    ids=["a lock", "a process"],
)
def test_a_server_that_loses_what_it_needs_while_it_loads_is_started_again(
    repository, tmp_path, says, does
):
    command, starts = tmp_path / "tritonserver", tmp_path / "starts"
    command.write_text(f"#!/bin/sh\necho x >> {starts}\necho '{says}'\n{does}\n")
    command.chmod(0o755)

    with LocalServer(repository, command=command) as server:
        with pytest.raises(ServerError, match=f"in {START_ATTEMPTS} starts .*\n{says}"):
            server.wait_ready(timeout=60)

    assert starts.read_text() == "x\n" * START_ATTEMPTS


def test_a_model_that_does_not_load_is_told_with_its_reason(repository, backends):
    (backends / "identity/model.py").write_text("raise RuntimeError('no luck today')\n")

    with LocalServer(repository, arguments=[f"--backend-directory={backends}"]) as server:
        with pytest.raises(ServerError) as error:
            server.wait_ready()

    assert str(error.value) == "echo cannot be loaded: RuntimeError: no luck today"


def test_another_end_of_the_server_is_told_with_its_log(repository, backends):
    arguments = [f"--backend-directory={backends}", "--unheard-of=1"]

    with LocalServer(repository, arguments=arguments) as server:
        with pytest.raises(ServerError, match=r"ended with exit code 1\n(.*\n)*.*--trace"):
            server.wait_ready()


@pytest.mark.full
def test_stop_ends_the_stub_of_a_server_that_was_killed(repository, backends):
    with LocalServer(repository, arguments=[f"--backend-directory={backends}"]) as server:
        server.wait_ready()
        group = processes_of_group(server.pid)
        assert len(group) >= 2

        os.kill(server.pid, signal.SIGKILL)
        server.stop()

    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in group)


_SERVES = """
import sys, time
from varlen_tools.local_server import LocalServer, end_on_sigterm
end_on_sigterm()
with LocalServer(sys.argv[1], arguments=["--backend-directory=" + sys.argv[2]]) as server:
    server.wait_ready()
    print(server.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.full
def test_a_program_that_is_told_to_end_ends_its_server(repository, backends):
    command = [sys.executable, "-c", _SERVES, str(repository), str(backends)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())

        program.terminate()

        assert program.wait(60) == 128 + signal.SIGTERM
    assert not is_alive(pid)


@pytest.mark.full
def test_perf_analyzer_runs(repository, backends):
    with LocalServer(repository, arguments=[f"--backend-directory={backends}"]) as server:
        server.wait_ready()
        address = server.http_url.removeprefix("http://")
        command = [find_command("perf_analyzer"), "-m", "echo", "-u", address]
        command += ["--shape=IN:4", "--request-count=50"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "infer/sec" in run.stdout, run.stdout + run.stderr


def test_a_busy_default_port_is_refused_before_the_server_starts(repository):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        command = [find_command("tritonserver"), f"--model-repository={repository}"]
        run = subprocess.run(
            [*command, "--http-port", str(port)], capture_output=True, text=True, check=False
        )

    assert run.returncode == 2
    assert run.stderr == f"tritonserver: port {port} is in use; pass --http-port with a free one\n"


def test_a_free_port_is_none_that_an_outgoing_connection_takes():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

    ports = [free_port() for _ in range(20)]

    assert max(ports) < max(first, 11_000)
    with socket.socket() as server:
        server.bind((LOOPBACK, ports[-1]))


def test_a_reserved_port_is_free_for_those_that_share_it_alone():
    with reserved_port() as port, socket.socket() as other, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((LOOPBACK, port))
        server.listen()
        socket.create_connection((LOOPBACK, port)).close()


def echo(server: LocalServer, sent: np.ndarray) -> np.ndarray:
    tensor = httpclient.InferInput("IN", list(sent.shape), "FP32")
    tensor.set_data_from_numpy(sent)
    client = httpclient.InferenceServerClient(server.http_url.removeprefix("http://"))
    try:
        return client.infer("echo", [tensor]).as_numpy("OUT")
    finally:
        client.close()


def processes_of_group(group: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name in brackets: state, parent, group.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
