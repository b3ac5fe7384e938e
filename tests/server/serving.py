"""Model repositories, server processes, metrics, and the model control API, for tests."""

import asyncio
import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from varlen.errors import VarlenError
from varlen.execution.device import usable_cores
from varlen.execution.runner import Runner
from varlen.execution.workers import process
from varlen.execution.workers.compiled_work import StoredModel, torch_reason, write_model
from varlen.tasks import ITERATIVE_TASKS
from varlen_bench.harness.resident import hosts_of
from varlen_tools.local_server import LOOPBACK, LocalServer
from varlen_tools.model_source import find_source
from varlen_tools.scratch import remove_unused

# Longer than any condition takes on a busy machine. Only a failing test waits this long.
TIMEOUT_SECONDS = 300.0

# Module of the processes that run models.
_WORKER = "varlen.execution.workers.child"


def add_model(
    repository: Path, name: str, checkpoint: Path, *, text: str = "", **parameters: str
) -> None:
    """Add a model that serves `checkpoint` to a repository.

    Args:
        text: lines of config.pbtxt, besides backend and parameters.
        parameters: settings of the engine; one CPU thread and fp32 unless given, whose answers do not depend on the
            machine, and no measuring of costs.
    """
    folder = repository / name
    folder.mkdir(parents=True)
    (folder / "1").symlink_to(checkpoint.resolve(), target_is_directory=True)
    settings = {"device": "cpu", "dtype": "fp32", "threads": "1", "warmup_seconds": "0"}
    settings |= parameters
    lines = ['backend: "varlen"', text]
    lines += [
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
        for key, value in settings.items()
    ]
    (folder / "config.pbtxt").write_text("\n".join(lines))
    store_compiled(folder)


def store_compiled(model: Path) -> None:
    """Store a model, compiled by this process, where the server's loads look for it.

    They would import torch to compile it, which takes most of a load; this process has imported it. It leaves out
    models that are not stored, and those that measure their machine as they load.
    """
    with suppress(VarlenError):
        source = find_source(model, {})
        config, checkpoint = source.config, source.open_checkpoint()
        generates = (config.task or checkpoint.task) in ITERATIVE_TASKS
        measures = config.device != "cpu" or config.warmup_seconds
        if generates or measures or config.num_processes > 1:
            return
        runner = Runner(checkpoint, config, workers=config.threads or usable_cores())
        runner.compile_products()
        path = process._stored_path(source.checkpoint, config, generates=False)
        stored = StoredModel.of({"folder": str(source.checkpoint), "stored": path})
        if stored is not None and not torch_reason(runner):
            with os.fdopen(write_model(runner, config.log_level.upper())) as file:
                stored.write(file.fileno())


def wait_until(condition: Callable[[], bool], what: str, timeout: float = TIMEOUT_SECONDS) -> None:
    """Wait until `condition` holds; fail the test after a timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout:g} s still not: {what}"
        time.sleep(0.05)


def http_call(server: LocalServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Return status and parsed body of a call of the server's HTTP API."""
    connection = http.client.HTTPConnection(LOOPBACK, server.http_port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content else None
    finally:
        connection.close()


def load(server: LocalServer, model: str, config: Mapping[str, Any] | None = None) -> str | None:
    """Load a model, and return None or why it failed.

    Args:
        config: replaces the model's config.pbtxt.
    """
    parameters = {} if config is None else {"parameters": {"config": json.dumps(config)}}
    status, answer = http_call(server, "POST", f"/v2/repository/models/{model}/load", parameters)
    return None if status == 200 else str(answer["error"])


def load_all(server: LocalServer, models: Collection[str]) -> None:
    """Load several models at once; fail the test if one cannot be loaded."""
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(partial(load, server), models)) == [None] * len(models)


def unload(server: LocalServer, model: str) -> None:
    """Ask the server to unload a model; it may still answer accepted requests."""
    status, answer = http_call(server, "POST", f"/v2/repository/models/{model}/unload", {})
    assert status == 200, answer


@contextmanager
def running_server(repository: Path) -> Iterator[LocalServer]:
    """Run a server that loads no model yet; remove what its killed processes leave."""
    with LocalServer(repository, arguments=["--exit-timeout-secs=2"], is_managed=True) as server:
        server.wait_ready()
        yield server
        server.stop(timeout=5)
    remove_unused()


def model_state(server: LocalServer, model: str) -> str:
    """Return the server's state of a model: READY, LOADING, UNLOADING or UNAVAILABLE."""
    _, models = http_call(server, "POST", "/v2/repository/index", {})
    states = [entry.get("state", "UNAVAILABLE") for entry in models if entry["name"] == model]
    return states[0] if states else "UNAVAILABLE"


def metrics(server: LocalServer, model: str) -> dict[str, float]:
    """Return a model's series, without the labels that say whose they are: {"varlen_requests_total ok": 3.0}."""
    with urllib.request.urlopen(server.metrics_url, timeout=TIMEOUT_SECONDS) as page:
        lines = page.read().decode().splitlines()
    found = {}
    for line in lines:
        match = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2])) if match else {}
        if match and labels.pop("model", None) == model:
            if match[1].startswith("varlen_"):
                # with the group's number where config.pbtxt names an instance group
                assert labels.pop("instance") in (f"{model}_0", f"{model}_0_0")
            assert labels.pop("version") == "1"
            found[" ".join([match[1], *labels.values()])] = float(match[3])
    return found


def outcomes(server: LocalServer, model: str) -> dict[str, int]:
    """Return a model's answered requests by outcome, once all of them are counted.

    The server's own `success` is the number of requests it passed on, whatever their outcome.
    """
    series: dict[str, float] = {}

    def is_settled() -> bool:
        series.update(metrics(server, model))
        return sum(_by_outcome(series).values()) == series["nv_inference_request_success"]

    wait_until(is_settled, f"all requests of {model} are counted")
    return _by_outcome(series)


def _by_outcome(series: Mapping[str, float]) -> dict[str, int]:
    prefix = "varlen_requests_total "
    return {
        name.removeprefix(prefix): int(value)
        for name, value in series.items()
        if name.startswith(prefix)
    }


def wait_until_idle(server: LocalServer, model: str) -> None:
    """Wait until the model's queue is empty."""

    def is_idle() -> bool:
        series = metrics(server, model)
        return series["varlen_queued_requests"] == series["varlen_queued_tokens"] == 0

    wait_until(is_idle, f"the queue of {model} is empty")


def wait_until_free(server: LocalServer, model: str) -> dict[str, float]:
    """Wait until no sequence is left and every block is free, and return the metrics."""
    names = (
        "varlen_kv_blocks_used",
        "varlen_kv_blocks_reserved",
        "varlen_running_sequences",
        "varlen_waiting_sequences",
        "varlen_queued_requests",
    )
    series: dict[str, float] = {}

    def is_free() -> bool:
        series.update(metrics(server, model))
        return not any(series[name] for name in names)

    wait_until(is_free, f"{model} has no sequence and no block in use")
    return series


async def cancel_once_it_runs(server: LocalServer, model: str, task: asyncio.Task[Any]) -> None:
    """Cancel a request of a model that was free once it has blocks in use."""
    while metrics(server, model)["varlen_kv_blocks_used"] == 0:
        assert not task.done()
        await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def start_drain(server: LocalServer, *options: str) -> subprocess.Popen[str]:
    """Start `varlen drain` for a server."""
    command = [
        *(sys.executable, "-m", "varlen_client.cli.main", "drain", f"--server-pid={server.pid}"),
        *(f"--metrics-url={server.metrics_url}", *options),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stubs(server_pid: int) -> list[int]:
    """Return the process ids of a server's Python processes, even after its end."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and str(server_pid) in _stub_arguments(int(entry.name))
    ]


def stub_of(server: LocalServer, model: str) -> int:
    """Return the process id of the Python process that runs a model."""
    (pid,) = [pid for pid in stubs(server.pid) if f"{model}_0" in _stub_arguments(pid)]
    return pid


def watchdogs(stub_pid: int) -> list[int]:
    """Return the process ids of a stub's watchdogs, even after its end."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and _is_watchdog(_command_line(int(entry.name)), stub_pid)
    ]


def _is_watchdog(arguments: list[str], stub_pid: int) -> bool:
    return "varlen-watchdog" in arguments and str(stub_pid) in arguments


def worker_processes(stub_pid: int) -> tuple[int, list[int]]:
    """Return the process ids of a stub's host of workers and of the workers."""
    (host,) = hosts_of(stub_pid)
    return host, _children(host)


def step_worker(stub_pid: int) -> int:
    """Return the process id of the worker of a model that generates."""
    (worker,) = hosts_of(stub_pid)
    return worker


def holders_of(stub_pid: int) -> list[int]:
    """Return the process ids of the ranks or stages of a model, the leader first."""
    (leader,) = hosts_of(stub_pid)
    return [leader, *_children(leader)]


def _children(pid: int) -> list[int]:
    """Return the process ids of the children that run workers."""
    # /proc lists the children of each thread apart
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for each in threads for child in (each / "children").read_text().split()]
    return [child for child in children if _WORKER in _command_line(child)]


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    return _command_line(pid) != [""]


def shared_memory(server_pid: int) -> list[Path]:
    """Return the shared memory regions of a server and its Python processes.

    They remain after a kill of either.
    """
    arguments = [argument for pid in stubs(server_pid) for argument in _stub_arguments(pid)]
    return [Path("/dev/shm", name) for name in arguments if "_shm_region_" in name]


def remove_shared_memory(regions: list[Path]) -> None:
    """Remove these regions, if they still exist."""
    for region in regions:
        region.unlink(missing_ok=True)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _stub_arguments(pid: int) -> list[str]:
    """Return the command line of a stub; empty for zombies and other processes."""
    arguments = _command_line(pid)
    return arguments if arguments[0].endswith("triton_python_backend_stub") else []


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return [""]
