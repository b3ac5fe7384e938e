"""The gateway's `/v1/embeddings` beside gRPC of the same server and beside infinity-emb.

All get the same texts. The routes take turns, in rounds of a few seconds, with 16 clients and with one.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from varlen_bench.compare.turns import in_turn
from varlen_bench.harness.accuracy import EQUAL_QUALITY, Vectors, cosines
from varlen_bench.harness.command import Progress
from varlen_bench.harness.machine import gflops
from varlen_bench.harness.resident import MIB, family_bytes, family_seconds
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import Spread, rounded
from varlen_bench.harness.worker import WorkerError, WorkerProcess
from varlen_bench.peers import engines
from varlen_bench.serving.report import reason
from varlen_bench.serving.server import READY_SECONDS, ServedSystem, Settings, write_models
from varlen_bench.workers.serving import Load, Row
from varlen_bench.workloads import WORDS, Mix
from varlen_tools.local_server import (
    LOOPBACK,
    LocalServer,
    ServerError,
    find_command,
    free_port,
    is_healthy,
)
from varlen_tools.tables import Table

# Requests in flight of a load.
CLIENTS = (16, 1)
_TEXTS = 64
# Lengths of texts in tokens; the tokenizer adds one at each end, and each word is a token.
_TOKENS, _ADDED_TOKENS = range(5, 31), 2
GRPC, GATEWAY, INFINITY = "-grpc", "-gateway", "infinity-fp32"
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_WORKER = "varlen_bench.workers.sockets"
_COST = re.compile(r"([\d.]+) ms (\w+)")
_FAULTS = (ServerError, WorkerError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True)
class Route:
    """One way to the vectors of a text.

    Attributes:
        system: name in rows.
        processes: ids of the processes that answer, with their children, by a word for them.
        least_cosine: mean cosine to fp32 below which answers are wrong.
    """

    system: str
    protocol: Literal["http", "grpc"]
    port: int
    path: str
    model: str
    processes: Mapping[str, int]
    least_cosine: float = EQUAL_QUALITY


def text_mix(limit: int) -> Mix:
    """Return the lengths of the texts that are sent unless others are chosen."""
    lengths = tuple(tokens for tokens in _TOKENS if tokens <= limit)
    return Mix("texts", f"texts {lengths[0]}-{lengths[-1]}", lengths)


def texts_of(mix: Mix, seed: int) -> list[str]:
    """Return texts of these lengths."""
    counts = [max(1, tokens - _ADDED_TOKENS) for tokens in mix.take(_TEXTS, seed)]
    return [
        " ".join(WORDS[(index + word) % len(WORDS)] for word in range(count))
        for index, count in enumerate(counts)
    ]


def compare(settings: Settings, scratch: Path, report: Progress) -> Iterator[list[Row]]:
    """Measure each route by turns; yield the rows of each turn."""
    for mix in settings.mixes:
        texts = texts_of(mix, settings.seed)
        report("vectors that every route has to return")
        vectors = _reference(settings, texts)
        for system in settings.systems:
            try:
                yield from _compare(system, settings, mix, texts, vectors, scratch, report)
            except _FAULTS as error:
                note = f"did not run on: {reason(error)}"
                yield [Row(mix.label, f"{system.name}{GATEWAY}", "failed", note=note)]


def _compare(
    system: ServedSystem,
    settings: Settings,
    mix: Mix,
    texts: Sequence[str],
    vectors: Vectors,
    scratch: Path,
    report: Progress,
) -> Iterator[list[Row]]:
    if not system.is_ours:
        raise RuntimeError(f"{system.name} has no gateway")
    with ExitStack() as started:
        report(f"{system.name}: starting")
        routes = list(started.enter_context(_own_routes(system, settings, scratch)))
        try:
            routes.append(started.enter_context(_infinity(settings, scratch)))
        except _FAULTS as error:
            note = f"did not run on: {reason(error)}"
            yield [Row(mix.label, INFINITY, "failed", note=note)]
        generator = started.enter_context(
            WorkerProcess(_WORKER, {"texts": texts}, scratch / "generator.log", threads=1)
        )
        least = {each.system: _least_cosine(each, generator, vectors) for each in routes}
        for turn in range(settings.turns):
            report(f"{mix.label}: turn {turn + 1} of {settings.turns}")
            rows = []
            for clients in CLIENTS:
                label = f"{mix.label}, {clients} at once"
                load = Load(
                    "gateway",
                    replace(mix, label=label),
                    settings.seconds,
                    settings.seed + turn,
                    max_waiting=clients,
                )
                for route in in_turn(routes, turn):
                    row = _measure(route, load, generator)
                    rows.append(replace(row, turn=turn, cosine_min=least[route.system]))
            yield rows


def _measure(route: Route, load: Load, generator: WorkerProcess) -> Row:
    """Return the row of a load; its note has the processor time of a request."""

    def spent() -> dict[str, float]:
        return {name: family_seconds(pid) for name, pid in route.processes.items()}

    before = spent()
    answer = generator.ask(route=asdict(route), load=asdict(load))
    costs = {name: seconds - before[name] for name, seconds in spent().items()}
    row = Row(**answer["row"])
    costs["generator"] = answer["seconds"]
    note = ", ".join(
        f"{1000 * seconds / max(1, row.sent or 0):.3f} ms {name}" for name, seconds in costs.items()
    )
    memory = sum(map(family_bytes, route.processes.values())) / MIB
    note = "; ".join(filter(None, [f"processor time of a request: {note}", row.note]))
    return replace(row, rss_mib=memory, machine_gflops=gflops(), note=note)


def _least_cosine(route: Route, generator: WorkerProcess, vectors: Vectors) -> float:
    """Return the least cosine to the reference.

    Raises:
        RuntimeError: the route returns wrong vectors.
    """
    answer = generator.ask(route=asdict(route))
    if "error" in answer:
        raise RuntimeError(f"{route.system}: {answer['error']}")
    found = cosines(np.array(answer["vectors"], dtype=np.float32), vectors)
    mean = float(found.mean())
    # a zero vector has no cosine: NaN
    if not mean >= route.least_cosine:
        raise RuntimeError(
            f"{route.system}: answers are wrong: cosine {mean:.4f}; allowed: {route.least_cosine}"
        )
    return float(found.min())


def _reference(settings: Settings, texts: Sequence[str]) -> Vectors:
    """Return the vectors of texts by transformers in fp32, one at a time."""
    tokenizer = Tokenizer.from_file(str(settings.model / "tokenizer.json"))
    tokenizer.no_padding()
    embed = engines.load(
        "transformers", settings.model, "fp32", cores=engines.Cores(1, settings.threads)
    )
    return np.concatenate([embed([tokenizer.encode(text).ids]) for text in texts])


@contextmanager
def _own_routes(system: ServedSystem, settings: Settings, scratch: Path) -> Iterator[list[Route]]:
    """Yield gRPC of a server, and the gateway before it."""
    environment = {"XDG_CACHE_HOME": str(scratch), "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory(prefix="varlen-gateway-") as folder:
        write_models(Path(folder), replace(system, takes_texts=True), settings)
        arguments = ["--disable-auto-complete-config"]
        with LocalServer(folder, arguments=arguments, environment=environment) as server:
            server.wait_ready(READY_SECONDS)

            def command(port: int) -> list[str]:
                return [
                    find_command("varlen"),
                    "serve-http",
                    f"--url={server.grpc_url}",
                    f"--port={port}",
                ]

            with _http_server(command, scratch / "gateway.log") as (port, pid):
                model, least, name = system.models[0], system.least_cosine, system.name
                processes = {"server": server.pid}
                grpc = Route(
                    name + GRPC, "grpc", server.grpc_port, _METHOD, model, processes, least
                )
                processes = {"gateway": pid, **processes}
                path = "/v1/embeddings"
                yield [grpc, Route(name + GATEWAY, "http", port, path, model, processes, least)]


@contextmanager
def _infinity(settings: Settings, scratch: Path) -> Iterator[Route]:
    """Yield the route of infinity-emb with its torch engine in fp32."""
    python = engines.peer_python("infinity")

    def command(port: int) -> list[str]:
        return [
            str(python.with_name("infinity_emb")),
            "v2",
            f"--model-id={settings.model.resolve()}",
            "--served-model-name=model",
            "--engine=torch",
            "--device=cpu",
            "--dtype=float32",
            "--url-prefix=/v1",
            f"--host={LOOPBACK}",
            f"--port={port}",
            "--no-model-warmup",
        ]

    with _http_server(command, scratch / "infinity.log") as (port, pid):
        yield Route(INFINITY, "http", port, "/v1/embeddings", "model", {"server": pid})


@contextmanager
def _http_server(command: Callable[[int], list[str]], log: Path) -> Iterator[tuple[int, int]]:
    """Yield the port and process of a server that a command starts.

    Raises:
        RuntimeError: it has ended, or is not ready in time.
    """
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(port), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not is_healthy(port, "/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise RuntimeError(f"{log.stem} is not ready: {(lines or [''])[-1]}")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def figures(rows: Sequence[Row]) -> dict[str, Cell]:
    """Return the keys of the BENCH line: medians over the turns."""
    found: dict[str, Cell] = {}
    for clients in CLIENTS:
        own = [row for row in rows if row.lengths.endswith(f", {clients} at once")]
        at = f"{clients}_at_once"
        found[f"requests_vs_grpc_{at}"] = _median(_ratios(own, GRPC))
        found[f"requests_vs_infinity_{at}"] = _median(_ratios(own, INFINITY))
        found[f"p50_ms_above_grpc_{at}"] = _median(_differences(own))
        costs = [cost for row in own for name, cost in costs_of(row) if name == "gateway"]
        found[f"gateway_ms_{at}"] = _median(costs)
    found["lost"] = sum(row.lost or 0 for row in rows)
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each load: medians over the turns, and their spread."""
    columns = ("system", "requests/s", "p50 ms", "p99 ms", "over gRPC", "processor ms of a request")
    loads = dict.fromkeys(row.lengths for row in rows if row.kind == "gateway")
    found = []
    for label in loads:
        own = [row for row in rows if row.lengths == label]
        lines = []
        for system in dict.fromkeys(row.system for row in own):
            of_system = [row for row in own if row.system == system]
            values = [
                [value for row in of_system if (value := getattr(row, name)) is not None]
                for name in ("served", "p50_ms", "p99_ms")
            ]
            costs: dict[str, list[float]] = {}
            for row in of_system:
                for name, cost in costs_of(row):
                    costs.setdefault(name, []).append(cost)
            cost_text = ", ".join(
                f"{statistics.median(each):.2f} {name}" for name, each in costs.items()
            )
            ratios = _ratios(own, GRPC, of=system)
            lines.append([system, *map(_spread, values), _spread(ratios), cost_text])
        found.append(Table(label, columns, lines))
    return found


def costs_of(row: Row) -> list[tuple[str, float]]:
    """Return the ms of processor time of a request, from the note of a row."""
    return [(name, float(cost)) for cost, name in _COST.findall(row.note)]


def _by_turn(rows: Sequence[Row], ending: str) -> dict[int | None, Row]:
    return {row.turn: row for row in rows if row.system.endswith(ending)}


def _ratios(rows: Sequence[Row], base: str, of: str = GATEWAY) -> list[float]:
    """Return the ratio of requests/s of two systems, by turn."""
    ours, theirs = _by_turn(rows, of), _by_turn(rows, base)
    return [
        (ours[turn].served or 0.0) / served
        for turn in ours.keys() & theirs.keys()
        if (served := theirs[turn].served)
    ]


def _differences(rows: Sequence[Row]) -> list[float]:
    """Return the median latency that the gateway adds to gRPC, in ms, by turn."""
    ours, theirs = _by_turn(rows, GATEWAY), _by_turn(rows, GRPC)
    return [
        mine - other
        for turn in ours.keys() & theirs.keys()
        if (mine := ours[turn].p50_ms) is not None and (other := theirs[turn].p50_ms) is not None
    ]


def _median(values: Sequence[float]) -> Cell:
    return rounded(statistics.median(values)) if values else None


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "n/a"
    spread = Spread.of(values)
    return f"{spread.median:.4g} ({spread.p20:.4g}-{spread.p80:.4g})"
