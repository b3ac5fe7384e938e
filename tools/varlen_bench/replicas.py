"""The benchmark of faults: processes of one of two replicas are killed under load.

Each path to two replicas, a proxy of deploy/ or our client, gets loads at a share of its measured capacity. Meanwhile a
process of the first replica is killed, and later replaced as a supervisor would. `make bench-replicas` runs it with
its defaults.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar

import typer

from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.compare.subject import Subject, command
from varlen_bench.harness.command import Progress, Seed, select
from varlen_bench.harness.generator import LoadRecord, Outcome, RequestRecord, offer, saturate
from varlen_bench.harness.replicas import (
    FAULTS,
    PROXIES,
    Fault,
    Proxy,
    Replica,
    find_proxy,
    replicas,
)
from varlen_bench.harness.rows import Cell, csv_table
from varlen_bench.harness.summary import percentile_ms, rounded
from varlen_bench.workloads import Mix, named_mix, next_poisson_times, token_ids
from varlen_client import AsyncClient, RetryPolicy, VarlenClientError
from varlen_client.metrics import fetch_metrics, read_metrics
from varlen_tools.local_server import end_on_sigterm
from varlen_tools.scratch import remove_unused
from varlen_tools.tables import Table

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
# Requests without an answer of an open loop, and of the closed loop that measures capacity.
_MOST_WAITING = 4000
_IN_FLIGHT = 16
# The fault comes after this share of the requests.
_STRIKES_AFTER = 0.1


@dataclass(frozen=True, slots=True)
class Route:
    """A way of requests to the replicas."""

    # of the proxy, or "client" for our client with the addresses of both replicas
    name: str
    urls: tuple[str, ...]
    # without retries behind a proxy, which replays
    retry: RetryPolicy


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the CSV."""

    # process that was killed; none for a load without a fault
    event: str
    # name of the route
    path: str
    # requests/s that were sent; None for streams, which begin together
    offered: float | None
    answered: int
    failed: int
    # failed requests that were sent after the fault
    failed_later: int
    # seconds from the fault to the last failure; None without failures
    longest_failure_s: float | None
    # share of the requests that the first replica ran; None with a fault
    spread: float | None = None
    # latency since requests were due
    p50_ms: float | None = None
    p99_ms: float | None = None
    longest_ms: float | None = None
    # first failures
    note: str = ""


@dataclass(kw_only=True)
class ReplicasSubject(Subject[Row]):
    """Kill servers, workers and stubs of two replicas under load, behind proxies and without."""

    name: ClassVar = "replicas"
    packages: ClassVar = ("torch", "tritonclient", "grpcio", "varlen")

    models: Annotated[Path, typer.Option(help="Model repository with minilm and tiny_gpt2.")] = (
        Path("model_repository")
    )
    only: Annotated[
        str, typer.Option(help="Paths (haproxy, envoy, client), comma-separated; all if empty.")
    ] = ""
    requests: Annotated[int, typer.Option(min=20, help="Requests of each load.")] = 2000
    load: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Share of the measured capacity.")
    ] = 0.6
    seed: Seed = 0
    paths: list[str] = field(init=False)
    mix: Mix = field(init=False)

    def prepare(self) -> None:
        """Choose the paths that `only` names."""
        self.paths = select(self.only, [*PROXIES, _CLIENT])
        self.requests = 200 if self.quick else self.requests
        limit = Checkpoint.open(self.models / _EMBEDDER / "1").position_limit
        self.mix = named_mix("mixed", limit)

    def measure(self, progress: Progress) -> Iterator[list[Row]]:
        """Yield the row of each load."""
        bodies = token_ids(self.mix.take(self.requests, self.seed), _VOCABULARY, self.seed)
        with TemporaryDirectory(prefix="varlen-replicas-") as scratch:
            folder = Path(scratch)
            write_models(self.models, folder / "models")
            with replicas(folder / "models") as servers:
                for path in self.paths:
                    with _route(path, folder, servers) as (route, proxy):
                        if route is None:
                            progress(f"{path} is not installed")
                            continue
                        capacity = asyncio.run(
                            measure_capacity(route, _EMBEDDER, bodies, _CAPACITY_SECONDS)
                        )
                        progress(f"{path}: {capacity:.0f} requests/s at most")
                        rate = self.load * capacity
                        study = _Study(servers, route, proxy, bodies, rate, self.seed)
                        for row in study.rows():
                            progress(
                                f"{path}, {row.event}: {row.answered} answered, {row.failed} failed"
                            )
                            yield [row]
        remove_unused()

    def rows(self, results: Sequence[Row]) -> list[dict[str, Cell]]:
        """Return the rows with rounded figures."""
        return [
            {
                name: rounded(value) if isinstance(value, float) else value
                for name, value in asdict(row).items()
            }
            for row in results
        ]

    def tables(self, results: Sequence[Row]) -> list[Table | str]:
        """Return the table of all rows, and what they show that must not be."""
        rows = self.rows(results)
        columns = list(rows[0]) if rows else []
        return [csv_table(f"{self.mix.label} tokens", columns, rows), *_missed(results)]

    def figures(self, results: Sequence[Row]) -> dict[str, Cell]:
        """Return the number of rows, and of missed goals."""
        return {"rows": len(results), "missed": len(_missed(results))}

    def has_failed(self, results: Sequence[Row]) -> bool:
        """Return whether a goal was missed."""
        return bool(_missed(results))


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


def _missed(results: Sequence[Row]) -> list[str]:
    return [line for row in results for line in missed_goals(row)]


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


@dataclass(frozen=True, slots=True)
class _Study:
    """The loads and faults of one path."""

    _servers: Sequence[Replica]
    _route: Route
    _proxy: Proxy | None
    # token ids of each request
    _bodies: Sequence[Sequence[int]]
    # requests/s
    _rate: float
    _seed: int

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


async def measure_capacity(
    route: Route, model: str, requests: Sequence[Sequence[int]], seconds: float
) -> float:
    """Return the requests/s of a closed loop through a route."""
    async with AsyncClient(route.urls, model, retry=route.retry) as client:
        send = partial(_send, client, requests)
        await saturate(len(requests), send, in_flight=_IN_FLIGHT, seconds=seconds / 2)
        record = await saturate(len(requests), send, in_flight=_IN_FLIGHT, seconds=seconds)
    return sum(each.outcome == "ok" for each in record.requests) / seconds


async def send_through_fault(
    route: Route,
    model: str,
    requests: Sequence[Sequence[int]],
    due_times: Sequence[float],
    strike: Callable[[], None] | None,
) -> tuple[LoadRecord, float | None]:
    """Return the record of an open loop, and the time of the fault in it.

    Args:
        strike: kills a process after a tenth of the requests, in a thread; None for no fault.
    """
    struck_at: float | None = None

    async def strike_in_time() -> None:
        nonlocal struck_at
        if strike is not None:
            await asyncio.sleep(due_times[int(_STRIKES_AFTER * len(due_times))])
            struck_at = clock() - begin
            await asyncio.to_thread(strike)

    async with AsyncClient(route.urls, model, retry=route.retry) as client:
        # the connection and the model's info are not part of the load
        await client.embed([requests[0]])
        clock = asyncio.get_running_loop().time
        begin = clock()
        record, _ = await asyncio.gather(
            offer(due_times, partial(_send, client, requests), max_waiting=_MOST_WAITING),
            strike_in_time(),
        )
    return record, struck_at


async def stream_through_fault(
    route: Route, model: str, *, streams: int, max_tokens: int, strike: Callable[[], None]
) -> tuple[list[RequestRecord], float, list[str]]:
    """Return the records of streams, the time of the fault, and the errors.

    The fault comes after the first part of every stream.
    """
    clock = asyncio.get_running_loop().time
    begin, begun = clock(), asyncio.Semaphore(0)
    records = [RequestRecord(number, 0.0, 0.0) for number in range(streams)]
    reasons: list[str] = []

    async def read(record: RequestRecord) -> None:
        parts = 0
        try:
            stream = client.stream(
                [5, 6, 7], max_tokens=max_tokens, ignore_eos=True, seed=record.number
            )
            async with aclosing(stream):
                async for _ in stream:
                    parts += 1
                    if parts == 1:
                        begun.release()
            record.outcome = "ok"
        except VarlenClientError as error:
            record.outcome = "failed"
            reasons.append(f"{type(error).__name__}: {error}")
        record.done = clock() - begin

    async with AsyncClient(route.urls, model, retry=route.retry) as client:
        tasks = [asyncio.ensure_future(read(record)) for record in records]
        for _ in records:
            await begun.acquire()
        struck_at = clock() - begin
        await asyncio.to_thread(strike)
        await asyncio.gather(*tasks)
    return records, struck_at, reasons


def load_row(
    event: str,
    route: Route,
    records: Sequence[RequestRecord],
    struck_at: float | None,
    reasons: Sequence[str],
    *,
    offered: float | None = None,
    spread: float | None = None,
) -> Row:
    """Return the row of a load.

    Args:
        struck_at: time of the fault; None if there was none.
    """
    outcomes = Counter(each.outcome for each in records)
    failed = [each for each in records if each.outcome != "ok"]
    ends = [each.done - (struck_at or 0.0) for each in failed if each.done is not None]
    latencies = [each.latency() for each in records if each.outcome == "ok"]
    unanswered = outcomes["unanswered"]
    notes = [f"{unanswered} were never answered"] if unanswered else []
    return Row(
        event,
        route.name,
        offered,
        answered=outcomes["ok"],
        failed=len(failed),
        failed_later=sum(each.sent > (struck_at or 0.0) for each in failed),
        longest_failure_s=max(ends, default=None),
        spread=spread,
        p50_ms=percentile_ms(latencies, 50),
        p99_ms=percentile_ms(latencies, 99),
        longest_ms=1000 * max(latencies) if latencies else None,
        note="; ".join([*notes, *reasons[:1]]),
    )


async def _send(
    client: AsyncClient, requests: Sequence[Sequence[int]], number: int
) -> tuple[Outcome, str]:
    try:
        await client.embed([requests[number]])
    except VarlenClientError as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "ok", ""


app = command(ReplicasSubject)

if __name__ == "__main__":
    end_on_sigterm()
    app()
