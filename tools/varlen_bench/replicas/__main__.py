"""Command line of the benchmark of faults; `make bench-replicas` runs it with its defaults.

Each path to two replicas, a proxy of deploy/ or our client, gets loads at a share of its measured capacity. Meanwhile a
process of the first replica is killed, and later replaced as a supervisor would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.harness import command, machine
from varlen_bench.harness.summary import rounded
from varlen_bench.harness.tables import csv_table
from varlen_bench.replicas.faults import FAULTS, Fault
from varlen_bench.replicas.loads import (
    Route,
    Row,
    load_row,
    measure_capacity,
    send_through_fault,
    stream_through_fault,
)
from varlen_bench.replicas.proxies import PROXIES, Proxy, Replica, find_proxy, replicas
from varlen_client import RetryPolicy
from varlen_client.metrics import fetch_metrics, read_metrics
from varlen_tools.local_server import end_on_sigterm
from varlen_tools.shared_memory import remove_unused
from varlen_tools.workloads import named_mix, next_poisson_times, token_ids

_PACKAGES = ("torch", "tritonclient", "grpcio", "varlen")
_CLIENT = "client"
# The configurations of deploy/ probe this model.
_EMBEDDER, _GENERATOR = "minilm", "tiny_gpt2"
# Cores of each server: two, so that models run in worker processes.
_THREADS = 2
_VOCABULARY = 30_000
_CAPACITY_SECONDS = 8.0
# Streams that are long enough for all to begin before the first ends.
_STREAMS, _STREAM_TOKENS = 48, 240
# Faults of streams, by event.
_STREAM_FAULTS = {"stream-server": "server", "stream-stub": "stub"}
# Longest allowed time from a fault to the failure of what it held; other events fail nothing.
_FAILURE_SECONDS = {"stub": 5.0, "stream-server": 1.0, "stream-stub": 5.0}
# The metrics page is updated twice a second.
_METRICS_SECONDS = 1.0

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    models: Annotated[
        Path, typer.Option(help="Model repository with minilm and tiny_gpt2.")
    ] = Path("model_repository"),
    only: Annotated[
        str, typer.Option(help="Paths (haproxy, envoy, client), comma-separated; all if empty.")
    ] = "",
    requests: Annotated[int, typer.Option(min=20, help="Requests of each load.")] = 2000,
    load: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Share of the measured capacity.")
    ] = 0.6,
    seed: command.Seed = 0,
    quick: command.Quick = False,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Kill servers, workers and stubs of two replicas under load, behind proxies and without."""
    with command.refused():
        paths = command.select(only, [*PROXIES, _CLIENT])
    bench = command.started(
        context,
        "replicas",
        machine.cpu_count(),
        packages=_PACKAGES,
        quick=quick,
        revision=revision,
        output=output,
    )
    count = 200 if quick else requests
    mix = named_mix("mixed", Checkpoint.open(models / _EMBEDDER / "1").position_limit)
    bodies = token_ids(mix.take(count, seed), _VOCABULARY, seed)
    rows: list[Row] = []
    with TemporaryDirectory(prefix="varlen-replicas-") as scratch, bench.progress() as progress:
        folder = Path(scratch)
        write_models(models, folder / "models")
        with replicas(folder / "models") as servers:
            for path in paths:
                with _route(path, folder, servers) as (route, proxy):
                    if route is None:
                        progress(f"{path} is not installed")
                        continue
                    capacity = asyncio.run(
                        measure_capacity(route, _EMBEDDER, bodies, _CAPACITY_SECONDS)
                    )
                    progress(f"{path}: {capacity:.0f} requests/s at most")
                    study = _Study(servers, route, proxy, bodies, load * capacity, seed)
                    for row in study.rows():
                        rows.append(row)
                        bench.append([_cells(row)])
                        progress(
                            f"{path}, {row.event}: {row.answered} answered, {row.failed} failed"
                        )
    remove_unused()
    bench.show(csv_table(f"{mix.label} tokens", list(asdict(rows[0])), map(_cells, rows)))
    missed = [line for row in rows for line in missed_goals(row)]
    bench.show(*missed)
    bench.finish("replicas", {"rows": len(rows), "missed": len(missed)})
    if missed:
        raise typer.Exit(1)


def write_models(source: Path, repository: Path) -> None:
    """Write a repository with the models of the benchmark."""
    for name, task in ((_EMBEDDER, "embed"), (_GENERATOR, "generate")):
        folder, checkpoint = repository / name, source / name / "1"
        folder.mkdir(parents=True)
        (folder / "1").symlink_to(checkpoint.resolve(), target_is_directory=True)
        settings = {
            "task": task,
            "device": "cpu",
            "threads": str(_THREADS),
            "max_sequence_tokens": str(Checkpoint.open(checkpoint).position_limit),
            "warmup_seconds": "3",
        }
        lines = ['backend: "varlen"'] + [
            f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
            for key, value in settings.items()
        ]
        (folder / "config.pbtxt").write_text("\n".join(lines), encoding="utf-8")


def missed_goals(row: Row) -> list[str]:
    """Return what a row shows that must not be."""
    where, missed = f"{row.path}, {row.event}", []
    if row.event in _FAILURE_SECONDS:
        most, longest = _FAILURE_SECONDS[row.event], row.longest_failure_s or 0.0
        if row.failed_later:
            missed.append(f"{where}: {row.failed_later} later requests failed")
        if longest > most:
            missed.append(f"{where}: one failed after {longest:.1f} s; at most {most:g} s")
    elif row.failed:
        missed.append(f"{where}: {row.failed} requests failed: {row.note}")
    if row.event in _STREAM_FAULTS and not row.failed:
        missed.append(f"{where}: no stream was on the killed process")
    if row.spread is not None and not 0.4 <= row.spread <= 0.6:
        missed.append(f"{where}: the first replica ran {row.spread:.0%} of the requests")
    return missed


class _Study:
    """The loads and faults of one path.

    Args:
        proxy: proxy of the path; None without one.
        bodies: token ids of each request.
        rate: requests/s.
    """

    def __init__(
        self,
        servers: Sequence[Replica],
        route: Route,
        proxy: Proxy | None,
        bodies: Sequence[Sequence[int]],
        rate: float,
        seed: int,
    ) -> None:
        self._servers = servers
        self._route = route
        self._proxy = proxy
        self._bodies = bodies
        self._rate = rate
        self._seed = seed

    def rows(self) -> Iterator[Row]:
        """Yield the row of each load."""
        yield self._unary("none", None)
        # it takes longer than the other loads
        yield self._unary("rolling restart", self._restart_all, repeats=3)
        for event, fault in FAULTS.items():
            # proxies do not replay the error of a dead stub: its probes take the replica out of service
            if event != "stub" or self._proxy is None:
                yield self._unary(event, partial(self._strike, fault))
                self._wait_until_up()
        for event, name in _STREAM_FAULTS.items():
            if name != "stub" or self._proxy is None:
                yield self._streams(event, FAULTS[name])
                self._wait_until_up()

    def _unary(self, event: str, strike: Callable[[], None] | None, *, repeats: int = 1) -> Row:
        before, bodies = self._counts(), [*self._bodies] * repeats
        due = next_poisson_times(len(bodies), self._rate, self._seed)
        record, struck_at = asyncio.run(
            send_through_fault(self._route, _EMBEDDER, bodies, due, strike)
        )
        spread = None
        if strike is None:
            ran = [after - count for after, count in zip(self._counts(), before, strict=True)]
            spread = ran[0] / sum(ran)
        return load_row(
            event,
            self._route,
            record.requests,
            struck_at,
            record.reasons,
            offered=self._rate,
            spread=spread,
        )

    def _strike(self, fault: Fault) -> None:
        fault.strike(self._servers[0], _EMBEDDER)
        if fault.repair_after is not None:
            time.sleep(fault.repair_after)
            self._replace()

    def _restart_all(self) -> None:
        """Drain, end and start one server after the other."""
        for server in self._servers:
            server.drain()
            server.stop()
            server.start()
            self._wait_until_up()

    def _streams(self, event: str, fault: Fault) -> Row:
        records, struck_at, reasons = asyncio.run(
            stream_through_fault(
                self._route,
                _GENERATOR,
                streams=_STREAMS,
                max_tokens=_STREAM_TOKENS,
                strike=lambda: fault.strike(self._servers[0], _GENERATOR),
            )
        )
        self._replace()
        return load_row(event, self._route, records, struck_at, reasons)

    def _replace(self) -> None:
        """Start the first replica again, as a supervisor does."""
        server = self._servers[0]
        if server.running.is_running:
            server.kill()
        server.stop()
        server.start()

    def _wait_until_up(self) -> None:
        if self._proxy is not None:
            self._proxy.wait_for(True, 0, 1)

    def _counts(self) -> list[float]:
        """Return the requests that each replica has answered."""
        time.sleep(_METRICS_SECONDS)
        counts = []
        for server in self._servers:
            page = fetch_metrics(server.running.metrics_url, timeout=10.0)
            sample = None if page is None else read_metrics(page, _EMBEDDER)
            counts.append(0.0 if sample is None else sum(sample.requests.values()))
        return counts


@contextmanager
def _route(
    path: str, folder: Path, servers: list[Replica]
) -> Iterator[tuple[Route | None, Proxy | None]]:
    """Yield a path's route and proxy; no route if the proxy is not installed."""
    if path == _CLIENT:
        yield Route(path, tuple(each.running.grpc_url for each in servers), RetryPolicy()), None
        return
    program = find_proxy(path)
    if program is None:
        yield None, None
        return
    with PROXIES[path](program, folder, servers) as proxy:
        yield Route(path, (proxy.grpc_url,), RetryPolicy(max_retries=0)), proxy


def _cells(row: Row) -> dict[str, str | int | float | None]:
    return {
        name: rounded(value) if isinstance(value, float) else value
        for name, value in asdict(row).items()
    }


if __name__ == "__main__":
    end_on_sigterm()
    app()
