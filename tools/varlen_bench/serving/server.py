"""A real server with one or more systems, and the process that loads it."""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from varlen_bench.harness.accuracy import Vectors
from varlen_bench.harness.machine import gflops
from varlen_bench.harness.resident import MIB, family_bytes, model_process
from varlen_bench.harness.summary import ratio
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.serving.loads import Load
from varlen_bench.serving.repository import write_models
from varlen_bench.serving.rows import Row
from varlen_bench.serving.systems import ServedSystem, Settings
from varlen_client.metrics import fetch_metrics, model_series
from varlen_tools.local_server import LocalServer
from varlen_tools.setup_server import SERVER_FOLDER

_WORKER = "varlen_bench.serving.worker"
_READY_SECONDS = 240.0
# Our backend updates its metrics twice a second.
_FLUSH_SECONDS = 1.5
_POLL_SECONDS = 0.05
_REQUESTS = "varlen_requests_total"
# The model.py of an older commit: its packages come before those that are installed.
_OLDER = """import sys

sys.path[:0] = {}
for name in list(sys.modules):
    if name.partition(".")[0] in ("varlen", "varlen_kernels"):
        del sys.modules[name]

from varlen.model import TritonPythonModel
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A ready server of one system, and the process that sends requests to it."""

    system: ServedSystem
    server: LocalServer
    generator: WorkerProcess
    address: str

    def measure(self, load: Load) -> Row:
        """Return the row of a load."""
        before, speed = self._series(), gflops()
        row = Row(**self.generator.ask(models=self.system.models, load=asdict(load)))
        growth = self._growth(before, (row.sent or 0) - (row.lost or 0))
        memory = sum(map(family_bytes, self.processes())) / MIB
        return replace(row, rss_mib=memory, machine_gflops=speed, **counted(growth))

    def embed(self, requests: Sequence[Sequence[int]]) -> Vectors:
        """Return the vectors of requests that are sent at once, [requests, hidden]."""
        answer = self.generator.ask(models=self.system.models, requests=requests)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return np.array(answer["vectors"], dtype=np.float32)

    def processes(self) -> list[int]:
        """Return the ids of the processes that run the models."""
        return [model_process(self.server.pid, name) for name in self.system.models]

    def _series(self) -> dict[str, float]:
        """Return the sum of each series over the models."""
        page = fetch_metrics(self.server.metrics_url, timeout=10)
        if page is None:
            raise RuntimeError("the server has no metrics page")
        total: Counter[str] = Counter()
        for name in self.system.models:
            total.update(model_series(page, name))
        return dict(total)

    def _growth(self, before: Mapping[str, float], answered: int) -> dict[str, float]:
        """Return the growth of each series, once all answered requests are counted."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while True:
            series = self._series()
            growth = {name: value - before.get(name, 0.0) for name, value in series.items()}
            if growth.get(_REQUESTS, answered) >= answered or time.monotonic() > deadline:
                return growth
            time.sleep(_POLL_SECONDS)


@contextmanager
def serve(system: ServedSystem, settings: Settings, scratch: Path) -> Iterator[Served]:
    """Yield a server of a system; it keeps the costs that it measures in `scratch`."""
    environment = {"XDG_CACHE_HOME": str(scratch), "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory(prefix="varlen-serving-") as folder:
        write_models(Path(folder), system, settings)
        arguments = ["--disable-auto-complete-config"]
        if system.revision:
            arguments.append(f"--backend-directory={backends_at(system.revision, scratch)}")
        with LocalServer(folder, arguments=arguments, environment=environment) as server:
            server.wait_ready(_READY_SECONDS)
            address = server.grpc_url.removeprefix("grpc://")
            argument = {"address": address, "vocabulary": settings.vocabulary}
            with WorkerProcess(_WORKER, argument, scratch / "log", threads=1) as generator:
                yield Served(system, server, generator, address)


def backends_at(revision: str, scratch: Path) -> Path:
    """Return a backends folder whose varlen comes from a commit, made in `scratch`.

    Raises:
        RuntimeError: git does not know the commit.
    """
    tree = scratch / revision
    backends = tree / "backends"
    if not backends.exists():
        git = ["git", "archive", "--format=tar", revision, "backend", "kernels"]
        archive = subprocess.run(git, capture_output=True, check=False)
        if archive.returncode:
            raise RuntimeError(archive.stderr.decode().strip())
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(tree, filter="data")
        (backends / "varlen").mkdir(parents=True)
        (backends / "python").symlink_to(SERVER_FOLDER / "backends" / "python")
        sources = [str(tree / "backend"), str(tree / "kernels")]
        (backends / "varlen" / "model.py").write_text(_OLDER.format(sources), encoding="utf-8")
    return backends


def counted(growth: Mapping[str, float]) -> dict[str, Any]:
    """Return the columns that a system counts itself, from the growth of its metrics."""
    sequences, batches = "varlen_batch_sequences_sum", "varlen_batch_sequences_count"
    if _REQUESTS not in growth:
        # a batch of a plain python backend is one call of `execute`
        sequences, batches = "nv_inference_count", "nv_inference_exec_count"
    padding = growth.get("varlen_padding_tokens_total")
    predicted, actual = "varlen_batch_predicted_seconds_sum", "varlen_batch_seconds_sum"
    error = ratio(growth.get(predicted), growth.get(actual))
    return {
        "mean_batch": ratio(growth.get(sequences), growth.get(batches)),
        "padding_share": ratio(padding, (padding or 0.0) + growth.get("varlen_tokens_total", 0.0)),
        "prediction_error": None if error is None else error - 1,
    }
