"""The serving benchmark: real servers, loaded until they cannot keep up.

docs/benchmarks/serving.md has the method; `make bench-serving` runs it with its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Annotated, Any, ClassVar

import numpy as np
import typer

from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench import pictures
from varlen_bench.compare.subject import Subject, command
from varlen_bench.compare.turns import in_turn
from varlen_bench.harness.accuracy import Vectors, cosines
from varlen_bench.harness.command import Only, Progress, Run, Seed
from varlen_bench.harness.neighbour import half_a_busy_core
from varlen_bench.harness.resident import family_bytes, sampled_memory
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import flatness
from varlen_bench.harness.worker import WorkerError
from varlen_bench.peers import engines
from varlen_bench.serving import gateway, perf_analyzer, report
from varlen_bench.serving.server import (
    DYNAMIC_BATCHER,
    LONE,
    OURS,
    OURS_FP32,
    PAIRED,
    SYSTEMS,
    Served,
    ServedSystem,
    Settings,
    before,
    chosen_systems,
    serve,
)
from varlen_bench.workers.serving import Kind, Load, Row, lone_mixes, max_waiting, seconds_at
from varlen_bench.workloads import MIXES, Mix, named_mix, token_ids, trace_mix
from varlen_tools.local_server import ServerError, end_on_sigterm
from varlen_tools.tables import Table

# By what is measured: seconds of a load, in full and quick; the systems that run if none are chosen, all if empty.
_SECONDS = {
    "": (6.0, 2.5),
    "paired": (6.0, 2.5),
    "overload": (120.0, 10.0),
    "lone": (2.0, 1.0),
    "gateway": (2.0, 1.0),
}
_DEFAULT_SYSTEMS = {
    "": "",
    "paired": ",".join(PAIRED),
    "overload": OURS,
    "lone": ",".join(LONE),
    "gateway": OURS_FP32,
}
# Turns of systems that take turns.
_TURNS = {"lone": 3, "gateway": 5}


# What a server or its generator may raise; anything else is a fault of the benchmark.
_FAULTS = (ServerError, WorkerError, RuntimeError, OSError)
_CHECKED_REQUESTS = 8
# Loads in multiples of a capacity.
_LIGHT, _CROSS_CHECKED, _PAIRED, _SATURATING, _OVERLOAD = 0.3, 0.5, (0.6, 0.8), 2.0, 2.0
# The window of perf_analyzer ends with a request, which is a large part of a short one.
_CROSS_CHECK_LONGER = 1.5
_OVERLOAD_CLOSED_SECONDS, _DEADLINE_MS = 4.0, 500
# Requests that may wait in an overload, in seconds of capacity: more than fit into their deadline.
_OVERLOAD_BACKLOG_SECONDS = 10.0
# Time between two samples of memory, and the share of the first samples that do not count: queues fill.
_SAMPLE_SECONDS, _FILLING = 1.0, 0.1


@dataclass(kw_only=True)
class ServingSubject(Subject[Row]):
    """Load real servers, ours and plain ones, until they cannot keep up."""

    name: ClassVar = "serving"
    packages: ClassVar = ("torch", "transformers", "onnxruntime", "tritonclient", "varlen")
    errors: ClassVar = (pictures.PictureError,)

    model: Annotated[Path, typer.Option(help="Hugging Face folder of a mean-pooled BERT.")] = Path(
        "model_repository/minilm/1"
    )
    only: Only = ""
    lengths: Annotated[
        str, typer.Option(help="uniform, short and mixed, comma-separated; by default all.")
    ] = ""
    trace: Annotated[
        Path | None, typer.Option(help="CSV with a column of lengths, in place of --lengths.")
    ] = None
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Measured seconds of a load that decides.")
    ] = None
    peer_batch: Annotated[
        int, typer.Option(min=2, help="Largest batch of the dynamic batcher.")
    ] = 8
    overload: Annotated[
        bool, typer.Option("--overload", help="Only twice the capacity, with deadlines.")
    ] = False
    lone: Annotated[
        bool, typer.Option("--lone", help="Only requests one by one, of 3 to 512 tokens, by turns.")
    ] = False
    gateway: Annotated[
        bool,
        typer.Option("--gateway", help="Only /v1/embeddings of the gateway beside gRPC, by turns."),
    ] = False
    paired: Annotated[
        int,
        typer.Option(
            min=0,
            help="Only systems by turns, in this number of turns: --only, or token_budget and dp.",
        ),
    ] = 0
    baseline: Annotated[
        str, typer.Option(help="Commit whose token_budget --paired compares with instead.")
    ] = ""
    busy: Annotated[
        bool, typer.Option("--busy", help="Keep half a core busy beside the servers.")
    ] = False
    seed: Seed = 0
    settings: Settings = field(init=False)

    @property
    def kind(self) -> str:
        """What is measured; empty: how much each system sustains."""
        if self.lone or self.gateway:
            return "lone" if self.lone else "gateway"
        return "overload" if self.overload else "paired" if self.paired else ""

    @property
    def bench_name(self) -> str:
        """Name of the BENCH line."""
        return f"serving_{self.kind}" if self.kind not in ("", "paired") else self.name

    def prepare(self) -> None:
        """Check the options."""
        # for the page, at the end
        pictures.check_matplotlib()
        kind, quick = self.kind, self.quick
        self.settings = Settings(
            model=self.model,
            systems=chosen_systems(self.only or _DEFAULT_SYSTEMS[kind], quick=quick),
            mixes=self._mixes(),
            seconds=self.seconds or _SECONDS[kind][quick],
            turns=self.paired or (1 if quick else _TURNS.get(kind, 2)),
            quick=quick,
            peer_batch=self.peer_batch,
            threads=self.cores,
            seed=self.seed,
            note="beside half a busy core" if self.busy else "",
        )

    def _mixes(self) -> list[Mix]:
        limit = Checkpoint.open(self.model).position_limit
        if self.lone:
            return lone_mixes(limit)
        if self.gateway and not self.lengths:
            return [gateway.text_mix(limit)]
        if self.trace is not None:
            return [trace_mix(self.trace, limit)]
        names = self.lengths or ("uniform" if self.quick or self.overload else ",".join(MIXES))
        return [named_mix(name.strip(), limit) for name in names.split(",") if name.strip()]

    def measure(self, progress: Progress) -> Iterator[Sequence[Row]]:
        """Yield the rows of each part of a run."""
        with (
            TemporaryDirectory(prefix="varlen-serving-") as scratch,
            half_a_busy_core() if self.busy else nullcontext(),
        ):
            if self.gateway:
                yield from gateway.compare(self.settings, Path(scratch), progress)
                return
            test = LoadTest(self.settings, Path(scratch), report=progress)
            if self.lone:
                yield from test.send_one_by_one()
            elif self.overload:
                yield from test.overload()
            elif self.paired:
                older = [before(self.baseline), SYSTEMS[OURS]] if self.baseline else []
                yield from test.compare_in_turns(older or self.settings.systems)
            else:
                yield from test.compare()

    def rows(self, results: Sequence[Row]) -> list[dict[str, Cell]]:
        """Return the rows."""
        return [asdict(row) for row in results]

    def tables(self, results: Sequence[Row]) -> list[Table | str]:
        """Return the tables, and what did not run."""
        return [*report.tables(results), *gateway.tables(results), *report.notes(results)]

    def figures(self, results: Sequence[Row]) -> dict[str, Cell]:
        """Return the keys of the BENCH line."""
        if self.lone:
            return report.lone_figures(results, self.settings.mixes)
        if self.gateway:
            return gateway.figures(results)
        if self.overload:
            return report.overload_figures(results)
        return report.bench_figures(results, self.settings.mixes)

    def has_failed(self, results: Sequence[Row]) -> bool:
        """Return whether a request was lost, or a system of ours failed."""
        failed = any(row.kind == "failed" and "varlen" in row.system for row in results)
        return bool(self.figures(results)["lost"]) or failed

    def show(self, bench: Run, results: Sequence[Row]) -> None:
        """Print the tables, and write the page beside the CSV."""
        super().show(bench, results)
        csv = bench.output or Path(mkdtemp(prefix="varlen-serving-"), "serving.csv")
        page = csv.with_name(f"{csv.stem}{self.kind and '-'}{self.kind}.html")
        text = report.page(results, self.figures(results), bench.provenance)
        page.write_text(text, encoding="utf-8")
        bench.show(f"report: {page}")


class LoadTest:
    """A run, with all rows that it has measured so far.

    Args:
        scratch: folder for logs and for the costs that servers measure.
    """

    def __init__(self, settings: Settings, scratch: Path, *, report: Progress) -> None:
        self.rows: list[Row] = []
        self._settings, self._scratch, self._report = settings, scratch, report
        self._cosines: dict[str, float] = {}
        report("vectors that every system has to return")
        self._requests, self._vectors = reference(settings)

    def compare(self) -> Iterator[list[Row]]:
        """Measure each system; then two policies in turns, if both are chosen."""
        for system in self._settings.systems:
            yield self._run_part(self._measure_system, system)
        if set(PAIRED) <= {system.name for system in self._settings.systems}:
            yield from self.compare_in_turns([SYSTEMS[name] for name in PAIRED])

    def compare_in_turns(self, systems: Sequence[ServedSystem]) -> Iterator[list[Row]]:
        """Measure systems under the same arrivals, at loads of the capacity of the first."""
        yield self._run_part(self._measure_in_turns, *systems)

    def overload(self) -> Iterator[list[Row]]:
        """Measure each system at twice its capacity, with deadlines."""
        for system in self._settings.systems:
            yield self._run_part(self._measure_overload, system)

    def send_one_by_one(self) -> Iterator[list[Row]]:
        """Measure the latency of all systems where a request never waits for another, by turns."""
        yield self._run_part(self._measure_one_by_one, *self._settings.systems)

    def _run_part(self, measure: Callable[..., None], *systems: ServedSystem) -> list[Row]:
        """Return the rows of systems, each on its server; an error becomes the last row."""
        names = " and ".join(system.name for system in systems)
        self._report(f"{names}: starting")
        begin = len(self.rows)
        try:
            with ExitStack() as servers:
                started = [
                    servers.enter_context(serve(system, self._settings, self._scratch))
                    for system in systems
                ]
                for served in started:
                    self._check(served)
                measure(*started)
        except _FAULTS as error:
            self.rows.append(
                Row("", names, "failed", note=f"did not run on: {report.reason(error)}")
            )
        return self.rows[begin:]

    def _check(self, served: Served) -> None:
        """Raise RuntimeError if a system returns wrong vectors."""
        vectors = served.embed(self._requests)
        try:
            found = cosines(vectors, self._vectors)
        except ValueError as error:
            raise RuntimeError(f"answers are wrong: {error}") from error
        mean, least = float(found.mean()), served.system.least_cosine
        # a zero vector has no cosine: NaN
        if not mean >= least:
            raise RuntimeError(f"answers are wrong: cosine {mean:.4f}; allowed: {least}")
        self._cosines[served.system.name] = float(found.min())

    def _measure_system(self, served: Served) -> None:
        for mix in self._settings.mixes:
            self._report(f"{served.system.name}: {mix.label}")
            self._measure_mix(served, mix)
        if served.system.name == OURS:
            self._cross_check(served)

    def _measure_mix(self, served: Served, mix: Mix) -> None:
        """Measure a system on one mix: capacity, search, saturation; add the result."""
        system, capacity = served.system, self._capacity(served, mix)
        hopeless = is_hopeless(system, capacity, self._rows_of(mix))
        seconds, steps = self._settings.search_effort(system, is_hopeless=hopeless)
        search = Search(capacity, steps)
        rate: float | None = _LIGHT * capacity
        number = 0
        while rate is not None:
            longer = seconds_at(rate, seconds) if number else seconds
            load = self._load("load", mix, longer, capacity, rate=rate, seed=number)
            row = self._measure(served, replace(load, may_give_up=True))
            search.record(rate, is_sustained=row.is_sustained, is_step=number > 0)
            rate, number = search.next_rate(), number + 1
        rows = self._rows_of(mix)
        best = max(row.capacity for row in rows if row.kind in {"closed", "most"})
        seconds = (
            min(2.0, self._settings.seconds)
            if self._settings.quick
            else 0.75 * self._settings.seconds
        )
        load = self._load("most", mix, seconds, capacity, rate=_SATURATING * best)
        most = self._measure(served, load)
        result = Row(mix.label, system.name, "result", rss_mib=most.rss_mib, saturated=most.served)
        cosine, sustained = self._cosines[system.name], search.sustained if steps else None
        self.rows.append(replace(result, cosine_min=cosine, sustained=sustained))

    def _cross_check(self, served: Served) -> None:
        """Measure one load with our generator, then with perf_analyzer."""
        system = served.system
        self._report(f"{system.name}: beside perf_analyzer")
        mix = self._settings.mixes[0]
        closed = (row for row in self._rows_of(mix) if row.kind == "closed")
        capacity = next(row.capacity for row in closed if row.system == system.name)
        seconds = _CROSS_CHECK_LONGER * self._settings.seconds
        load = self._load("load", mix, seconds, capacity, rate=_CROSS_CHECKED * capacity)
        self._measure(served, load)
        try:
            requests = load.token_ids(self._settings.vocabulary)
            row = perf_analyzer.measure(served.address, system.name, load, requests)
        except (RuntimeError, ServerError) as error:
            row = Row(
                mix.label, system.name, "failed", note=f"perf_analyzer: {report.reason(error)}"
            )
        self.rows.append(row)

    def _measure_in_turns(self, *systems: Served) -> None:
        """Measure systems under the same arrivals: A B, B A and so on."""
        turns, seconds = self._settings.turns, self._settings.seconds
        # the systems are nearly equal
        seconds *= 1.0 if self._settings.quick else 1.25
        for mix in self._settings.mixes:
            for turn in range(turns):
                self._report(f"{mix.label}: turn {turn + 1} of {turns}")
                # anew: the speed of a shared machine changes
                capacity = self._capacity(systems[0], mix)
                for part in _PAIRED:
                    rate = part * capacity
                    load = self._load("paired", mix, seconds, capacity, rate=rate, seed=turn)
                    for served in in_turn(systems, turn):
                        self._measure(served, load, turn=turn)

    def _measure_one_by_one(self, *systems: Served) -> None:
        for turn in range(self._settings.turns):
            self._report(f"one by one: turn {turn + 1} of {self._settings.turns}")
            for mix in self._settings.mixes:
                seed = self._settings.seed + turn
                load = Load("lone", mix, self._settings.seconds, seed, max_waiting=1)
                for served in in_turn(systems, turn):
                    self._measure(served, load, turn=turn)

    def _measure_overload(self, served: Served) -> None:
        for mix in self._settings.mixes:
            self._report(f"{served.system.name}: {mix.label}, overload")
            load = Load("closed", mix, _OVERLOAD_CLOSED_SECONDS, self._settings.seed)
            capacity = max(self._measure(served, load).served or 0.0, 1.0)
            overload = replace(
                load,
                kind="overload",
                seconds=self._settings.seconds,
                rate=_OVERLOAD * capacity,
                max_waiting=int(_OVERLOAD_BACKLOG_SECONDS * capacity),
                deadline_ms=_DEADLINE_MS,
            )
            (process,) = served.processes()
            with sampled_memory(process, _SAMPLE_SECONDS, family_bytes) as samples:
                row = served.measure(overload)
            full = samples[int(_FILLING * len(samples)) :]
            self.rows.append(replace(row, rss_flatness=flatness(full) if full else None))

    def _load(
        self, kind: Kind, mix: Mix, seconds: float, capacity: float, *, rate: float, seed: int = 0
    ) -> Load:
        """Return an open load for a system; `seed` is added to the run's."""
        return Load(kind, mix, seconds, self._settings.seed + seed, rate, max_waiting(capacity))

    def _capacity(self, served: Served, mix: Mix) -> float:
        seconds = min(2.0, self._settings.seconds) if self._settings.quick else 3.0
        load = Load("closed", mix, seconds, self._settings.seed)
        return self._measure(served, load).capacity

    def _measure(self, served: Served, load: Load, **columns: Any) -> Row:
        row = replace(served.measure(load), **columns)
        row = replace(row, note="; ".join(filter(None, [row.note, self._settings.note])))
        self.rows.append(row)
        return row

    def _rows_of(self, mix: Mix) -> list[Row]:
        return [row for row in self.rows if row.lengths == mix.label]


def is_hopeless(system: ServedSystem, capacity: float, rows: Sequence[Row]) -> bool:
    """Return whether a peer cannot be the best: another one sustains more than its capacity."""
    best = report.best_peer(rows)
    is_candidate = not system.is_ours and system.name != DYNAMIC_BATCHER
    return is_candidate and best is not None and capacity < (best.sustained or 0.0)


def reference(settings: Settings) -> tuple[list[list[int]], Vectors]:
    """Return requests of all lengths, and their vectors by transformers fp32, one at a time."""
    longest = max(max(mix.lengths) for mix in settings.mixes)
    lengths = [max(1, longest * (i + 1) // _CHECKED_REQUESTS) for i in range(_CHECKED_REQUESTS)]
    requests = token_ids(lengths, settings.vocabulary, settings.seed)
    embed = engines.load(
        "transformers", settings.model, "fp32", cores=engines.Cores(1, settings.threads)
    )
    return requests, np.concatenate([embed([ids]) for ids in requests])


# Parts of the capacity: the first load, and one that is too much.
_FIRST, _TOO_MUCH = 0.8, 1.15
# Factors while no load is sustained, or every load is.
_DOWN, _UP = 0.6, 1.25


@dataclass(slots=True)
class Search:
    """Bisection between the loads that were sustained and the smallest that was not."""

    # requests/s of a closed loop
    capacity: float
    # number of loads left to try
    steps: int
    _passed: list[float] = field(default_factory=list)
    _failed: list[float] = field(default_factory=list)

    @property
    def sustained(self) -> float:
        """The largest sustained load below every load that was not, or 0."""
        least = min(self._failed, default=float("inf"))
        return max((rate for rate in self._passed if rate < least), default=0.0)

    def next_rate(self) -> float | None:
        """Return the next load; None at the end of the search."""
        if self.steps <= 0 or self.capacity <= 0:
            return None
        first, sustained = _FIRST * self.capacity, self.sustained
        if self._failed:
            least = min(self._failed)
            return (sustained + least) / 2 if sustained else _DOWN * least
        if sustained < first:
            return first
        too_much = _TOO_MUCH * self.capacity
        return (sustained + too_much) / 2 if _UP * sustained < too_much else _UP * sustained

    def record(self, rate: float, *, is_sustained: bool, is_step: bool = True) -> None:
        """Record whether a load was sustained; the light load is not a step."""
        self.steps -= is_step
        (self._passed if is_sustained else self._failed).append(rate)


app = command(ServingSubject)

if __name__ == "__main__":
    end_on_sigterm()
    app()
