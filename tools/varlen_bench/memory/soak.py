"""Resident memory of a model behind a real tritonserver, over thousands of requests of random lengths.

Requests are single sequences of random ids over gRPC, many in flight. Memory is looked at while none is, after a
rest in which the process gives back what it freed: what is resident then is what is kept.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np

from varlen_bench.harness.resident import peak_resident_bytes, resident_bytes
from varlen_tools.local_server import LocalServer

_IN_FLIGHT = 16
_READY_SECONDS = 120.0
# The served process looks for memory to give back once a second.
_REST_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Soak:
    """What is sent.

    Attributes:
        repository, model: what is served.
        requests: after those that warm up.
        warmup: requests that are answered before the first look.
        every: requests between two looks.
        shortest, longest: lengths are uniform between, in tokens.
    """

    repository: Path
    model: str
    requests: int = 20_000
    warmup: int = 1_000
    every: int = 500
    shortest: int = 5
    longest: int = 256

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        config = self.repository / self.model / "1" / "config.json"
        return int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])


@dataclass(frozen=True, slots=True)
class Flatness:
    """What one process had resident, in bytes: at every look, and the most ever."""

    process: str
    samples: tuple[int, ...]
    peak: int

    @property
    def value(self) -> float:
        """How far the samples are apart, as a share of their median."""
        return (max(self.samples) - min(self.samples)) / statistics.median(self.samples)


def soak(order: Soak) -> list[Flatness]:
    """Return the flatness of the process that serves the model, and of the server.

    Raises:
        ServerError: the server does not start.
        RuntimeError: a request fails.
    """
    arguments = ["--model-control-mode=explicit", f"--load-model={order.model}"]
    with LocalServer(order.repository, arguments=arguments) as server:
        server.wait_ready(_READY_SECONDS)
        pids = {"stub": stub_of(server.pid, order.model), "server": server.pid}
        address = server.grpc_url.removeprefix("grpc://")
        looks = list(_looks(order, address, list(pids.values())))
        return [
            Flatness(process, tuple(look[place] for look in looks), peak_resident_bytes(pid))
            for place, (process, pid) in enumerate(pids.items())
        ]


def stub_of(server_pid: int, model: str) -> int:
    """Return the id of the Python process in which a server runs a model.

    Raises:
        RuntimeError: it has none.
    """
    # its one instance: the second form is of a model whose configuration has an instance group
    instances = {f"{model}_0", f"{model}_0_0"}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            words = _command_line(entry)
            is_stub = words[0].endswith("triton_python_backend_stub")
            if is_stub and str(server_pid) in words and instances & set(words):
                return int(entry.name)
    raise RuntimeError(f"the server has no process for the model {model}")


def _looks(order: Soak, address: str, pids: list[int]) -> Iterator[list[int]]:
    """Send all requests; yield what the processes have resident, after warm-up and then every so many requests."""
    from tritonclient.grpc import InferenceServerClient

    draw = random.Random(0)
    lengths = [draw.randint(order.shortest, order.longest) for _ in range(order.requests)]
    with InferenceServerClient(address) as client:
        sender = _Sender(client, order)
        sender.send([draw.randint(order.shortest, order.longest) for _ in range(order.warmup)])
        yield _look(pids)
        for begin in range(0, order.requests, order.every):
            sender.send(lengths[begin : begin + order.every])
            yield _look(pids)


def _look(pids: list[int]) -> list[int]:
    time.sleep(_REST_SECONDS)
    return [resident_bytes(pid) for pid in pids]


class _Sender:
    """Sends requests, so many in flight."""

    def __init__(self, client: Any, order: Soak) -> None:
        self._client = client
        self._model = order.model
        self._vocabulary = order.vocabulary
        self._numbers = np.random.default_rng(0)
        self._free = Semaphore(_IN_FLIGHT)
        self._errors: list[object] = []

    def send(self, lengths: list[int]) -> None:
        """Send a request of each length; return when all are answered.

        Raises:
            RuntimeError: one failed.
        """
        for length in lengths:
            self._free.acquire()
            self._start(length)
        for _ in range(_IN_FLIGHT):
            self._free.acquire()
        self._free.release(_IN_FLIGHT)
        if self._errors:
            raise RuntimeError(f"a request failed: {self._errors[0]}")

    def _start(self, length: int) -> None:
        from tritonclient.grpc import InferInput

        ids = self._numbers.integers(0, self._vocabulary, (1, length))
        tensor = InferInput("input_ids", ids.shape, "INT64")
        tensor.set_data_from_numpy(ids)
        self._client.async_infer(self._model, [tensor], callback=self._answered)

    def _answered(self, result: object, error: object) -> None:  # noqa: ARG002  # as the client calls it
        if error is not None:
            self._errors.append(error)
        self._free.release()


def _command_line(process: Path) -> list[str]:
    """Return a process's command line, a single empty word if it has none."""
    try:
        return (process / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return [""]
