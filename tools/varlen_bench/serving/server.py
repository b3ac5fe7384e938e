"""Systems, their model repositories, and a real server with its load generator.

`allow_ragged_batch` lets the dynamic batcher join requests of different lengths; the peer pads them to the longest.
`max_queue_delay_microseconds: 0`: no request waits while the model is idle.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.compare.systems import NamedEngine, by_name
from varlen_bench.harness.accuracy import EQUAL_QUALITY, Vectors
from varlen_bench.harness.command import select
from varlen_bench.harness.machine import gflops
from varlen_bench.harness.resident import MIB, family_bytes, model_process
from varlen_bench.harness.summary import ratio
from varlen_bench.harness.worker import WorkerProcess
from varlen_bench.peers.checkpoints import config_field
from varlen_bench.peers.engines import Precision
from varlen_bench.peers.exports import exported
from varlen_bench.workers.serving import INPUT, OUTPUT, Load, Row
from varlen_bench.workers.sockets import COUNT, TEXT
from varlen_bench.workloads import Mix
from varlen_client.metrics import fetch_metrics, model_series
from varlen_tools.local_server import LocalServer
from varlen_tools.setup_server import SERVER_FOLDER

OURS = "varlen-dp"
NONE = "varlen-none"
TOKEN_BUDGET = "varlen-token-budget"  # noqa: S105 - a policy
DYNAMIC_BATCHER = "transformers-fp32-dynamic"
# an older commit
BEFORE = "varlen-before"
OURS_FP32, OURS_INT8 = "varlen-fp32", "varlen-int8"
OURS_PADDED, FIFO_PADDED = "varlen-dp-padded", "varlen-fifo-padded"


@dataclass(frozen=True, slots=True)
class ServedSystem(NamedEngine):
    """One way to serve the model; its first model has its name."""

    # of a peer
    precision: Precision = "fp32"
    # whether the server's dynamic batcher joins requests; our backend has a scheduler instead
    dynamic: bool = False
    # whether the server runs an instance of the model on each core; else one on all
    per_core: bool = False
    # commit of our backend; the working tree if empty
    revision: str = ""
    # of our backend
    parameters: Mapping[str, str] = field(default_factory=dict)
    # models of one server; requests go to one after another
    copies: int = 1
    # whether our backend gets texts, as from the gateway; else token ids
    takes_texts: bool = False

    @property
    def models(self) -> list[str]:
        """Names of its models."""
        return [self.name, *(f"{self.name}-{i}" for i in range(2, self.copies + 1))]

    @property
    def least_cosine(self) -> float:
        """Mean cosine to fp32 of random token ids below which answers are wrong."""
        if self.precision == "int8":
            # peers quantize more; how far they are off is in the encoder's rows
            return 0.95
        # of real text int8 has 0.9997
        return 0.99 if self.parameters.get("dtype") == "int8" else EQUAL_QUALITY

    @property
    def is_key(self) -> bool:
        """Whether the BENCH line may have its `sustained`, which is then searched in full."""
        return not self.is_ours or self.name in {OURS, OURS_FP32, OURS_INT8, TOKEN_BUDGET}


def before(revision: str) -> ServedSystem:
    """Return our backend as of a commit, with a token budget."""
    return ServedSystem(BEFORE, "varlen", revision=revision, parameters={"policy": "token_budget"})


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run measures.

    Attributes:
        seconds: measured seconds of a load of a key system, or of an overload.
        peer_batch: largest batch of the server's dynamic batcher.
        note: note in every row.
    """

    model: Path
    systems: Sequence[ServedSystem]
    mixes: Sequence[Mix]
    seconds: float
    turns: int
    quick: bool
    peer_batch: int
    threads: int
    seed: int
    note: str = ""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return config_field(self.model, "vocab_size")

    def search_effort(self, system: ServedSystem, *, is_hopeless: bool) -> tuple[float, int]:
        """Return the measured seconds of each load of a search, and its number of steps."""
        if self.quick:
            return self.seconds, 2 if system.is_key and not is_hopeless else 0
        if is_hopeless:
            return 0.75 * self.seconds, 1
        return (self.seconds, 4) if system.is_key else (0.75 * self.seconds, 2)


# The conditions of the paper: at most 20 requests a batch, and no token limit below that.
_PADDED = {"execution": "padded", "max_batch_sequences": "20", "max_batch_tokens": "10240"}


def _ours(name: str, policy: str, **parameters: str) -> ServedSystem:
    padded = _PADDED if name.endswith("-padded") else {}
    return ServedSystem(name, "varlen", parameters={"policy": policy} | padded | parameters)


# The strongest peers, each with both forms of batching and of instances.
_PEERS = [
    ServedSystem(
        f"{engine}-{precision}-{'dynamic' if dynamic else 'single'}{'-per-core' if per_core else ''}",
        engine,
        precision,
        dynamic=dynamic,
        per_core=per_core,
    )
    for engine in ("onnxruntime", "openvino")
    for precision in ("fp32", "int8")
    for dynamic in (False, True)
    for per_core in (False, True)
]
# Ours first: they decide the load at which the peers are saturated.
SYSTEMS = by_name(
    _ours(TOKEN_BUDGET, "token_budget"),
    _ours(OURS, "dp"),
    ServedSystem(OURS_FP32, "varlen", parameters={"dtype": "fp32"}),
    ServedSystem(OURS_INT8, "varlen", parameters={"dtype": "int8"}),
    ServedSystem("varlen-int8-eight", "varlen", parameters={"dtype": "int8"}, copies=8),
    _ours(OURS_PADDED, "dp", dp_pressure="infinite"),
    _ours(FIFO_PADDED, "fifo"),
    _ours(NONE, "none"),
    ServedSystem(DYNAMIC_BATCHER, "transformers", dynamic=True),
    *_PEERS,
    ServedSystem("transformers-fp32-single", "transformers"),
    ServedSystem("transformers-bf16-dynamic", "transformers", "bf16", dynamic=True),
    ServedSystem("transformers-bf16-single", "transformers", "bf16"),
)
# Compared in turns unless others are chosen.
PAIRED = (TOKEN_BUDGET, OURS)
# Sent requests one by one unless others are chosen.
LONE = (
    OURS_FP32,
    OURS_INT8,
    "onnxruntime-fp32-single",
    "onnxruntime-int8-single",
    "openvino-fp32-single",
    "openvino-int8-single",
)
# Left out of a quick run: the BENCH line is hardly ever about them.
_NOT_QUICK = (NONE, "varlen-int8-eight", "transformers-bf16", "transformers-fp32-single")


def chosen_systems(only: str, *, quick: bool) -> list[ServedSystem]:
    """Return the systems that `only` names; by default all, or the important ones if `quick`."""
    excluded = _NOT_QUICK if quick and not only else ()
    return [SYSTEMS[name] for name in select(only, SYSTEMS) if not name.startswith(excluded)]


PEER = Path(__file__).with_name("padded_model.py")


def write_models(repository: Path, system: ServedSystem, settings: Settings) -> None:
    """Write the models of a system."""
    for name in system.models:
        _write_model(repository / name, system, settings)


def _write_model(model: Path, system: ServedSystem, settings: Settings) -> None:
    model.mkdir(parents=True)
    if system.is_ours:
        (model / "1").symlink_to(settings.model.resolve(), target_is_directory=True)
        parameters = {
            "task": "embed",
            "device": "cpu",
            "threads": str(settings.threads),
            "max_sequence_tokens": str(Checkpoint.open(settings.model).position_limit),
            "warmup_seconds": "2" if settings.quick else "20",
            **system.parameters,
        }
    else:
        (model / "1").mkdir()
        shutil.copy(PEER, model / "1" / "model.py")
        checkpoint = exported(settings.model, system.engine, system.precision)
        parameters = {
            "engine": system.engine,
            "checkpoint": str(checkpoint.resolve()),
            "precision": system.precision,
            "threads": "1" if system.per_core else str(settings.threads),
        }
    (model / "config.pbtxt").write_text(_config(system, settings, parameters), encoding="utf-8")


def _config(system: ServedSystem, settings: Settings, parameters: Mapping[str, str]) -> str:
    peer_batch = settings.peer_batch if system.dynamic else 1
    ragged = "allow_ragged_batch: true" if system.dynamic else ""
    hidden = config_field(settings.model, "hidden_size")
    instances = settings.threads if system.per_core else 1
    lines = [
        f'backend: "{"varlen" if system.is_ours else "python"}"',
        f"max_batch_size: {64 if system.is_ours else peer_batch}",
        f'input [ {{ name: "{TEXT}" data_type: TYPE_STRING dims: [ 1 ] }} ]'
        if system.takes_texts
        else f'input [ {{ name: "{INPUT}" data_type: TYPE_INT64 dims: [ -1 ] {ragged} }} ]',
        f'output [ {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: [ {hidden} ] }} ]',
        f'output [ {{ name: "{COUNT}" data_type: TYPE_INT32 dims: [ 1 ] }} ]'
        if system.takes_texts
        else "",
        f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]",
        "dynamic_batching { max_queue_delay_microseconds: 0 }" if system.dynamic else "",
    ]
    lines += [
        f'parameters {{ key: "{key}" value: {{ string_value: {json.dumps(value)} }} }}'
        for key, value in parameters.items()
    ]
    return "\n".join(lines) + "\n"


_WORKER = "varlen_bench.workers.serving"
READY_SECONDS = 240.0
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
        before = self._series()
        row = Row(**self.generator.ask(models=self.system.models, load=asdict(load)))
        growth = self._growth(before, (row.sent or 0) - (row.lost or 0))
        memory = sum(map(family_bytes, self.processes())) / MIB
        return replace(row, rss_mib=memory, machine_gflops=gflops(), **counted(growth))

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
            server.wait_ready(READY_SECONDS)
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
