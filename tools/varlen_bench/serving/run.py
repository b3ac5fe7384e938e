"""The order of a run: each system on its server, then two in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from varlen_bench.harness.accuracy import Vectors, cosines
from varlen_bench.harness.command import Progress
from varlen_bench.harness.resident import family_bytes, sampled_memory
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import flatness
from varlen_bench.harness.worker import WorkerError
from varlen_bench.peers import engines
from varlen_bench.serving import perf_analyzer
from varlen_bench.serving.figures import best_peer
from varlen_bench.serving.loads import Kind, Load, max_waiting, seconds_at
from varlen_bench.serving.rows import Row
from varlen_bench.serving.search import Search
from varlen_bench.serving.server import Served, serve
from varlen_bench.serving.systems import (
    DYNAMIC_BATCHER,
    OURS,
    PAIRED,
    SYSTEMS,
    ServedSystem,
    Settings,
)
from varlen_tools.local_server import ServerError
from varlen_tools.workloads import Mix, token_ids

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


class LoadTest:
    """A run, with all rows that it has measured so far.

    Args:
        scratch: folder for logs and for the costs that servers measure.
        append: gets the rows of each part of the run.
    """

    def __init__(
        self,
        settings: Settings,
        scratch: Path,
        *,
        report: Progress,
        append: Callable[[Sequence[Mapping[str, Cell]]], None],
    ) -> None:
        self.rows: list[Row] = []
        self._settings, self._scratch = settings, scratch
        self._report, self._append = report, append
        self._cosines: dict[str, float] = {}
        report("vectors that every system has to return")
        self._requests, self._vectors = reference(settings)

    def compare(self) -> None:
        """Measure each system; then two policies in turns, if both are chosen."""
        for system in self._settings.systems:
            self._run_part(self._measure_system, system)
        if set(PAIRED) <= {system.name for system in self._settings.systems}:
            self.compare_in_turns([SYSTEMS[name] for name in PAIRED])

    def compare_in_turns(self, systems: Sequence[ServedSystem]) -> None:
        """Measure systems under the same arrivals, at loads of the capacity of the first."""
        self._run_part(self._measure_in_turns, *systems)

    def overload(self) -> None:
        """Measure each system at twice its capacity, with deadlines."""
        for system in self._settings.systems:
            self._run_part(self._measure_overload, system)

    def send_one_by_one(self) -> None:
        """Measure the latency of all systems where a request never waits for another, by turns."""
        self._run_part(self._measure_one_by_one, *self._settings.systems)

    def _run_part(self, measure: Callable[..., None], *systems: ServedSystem) -> None:
        """Measure systems, each on its server; an error becomes the last row of the part."""
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
            self.rows.append(Row("", names, "failed", note=f"did not run on: {reason(error)}"))
        self._append([asdict(row) for row in self.rows[begin:]])

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
            row = Row(mix.label, system.name, "failed", note=f"perf_analyzer: {reason(error)}")
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
                    for served in systems[::-1] if turn % 2 else systems:
                        self._measure(served, load, turn=turn)

    def _measure_one_by_one(self, *systems: Served) -> None:
        for turn in range(self._settings.turns):
            self._report(f"one by one: turn {turn + 1} of {self._settings.turns}")
            for mix in self._settings.mixes:
                seed = self._settings.seed + turn
                load = Load("lone", mix, self._settings.seconds, seed, max_waiting=1)
                for served in systems[::-1] if turn % 2 else systems:
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
    best = best_peer(rows)
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


def reason(error: Exception) -> str:
    """Return the line of an error that explains most, such as the server's own reason."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "failed to load '" in line and ": " in line]
    text = reasons[0].split("version 1: ")[-1] if reasons else (lines or [type(error).__name__])[0]
    # a Python traceback follows the reason, on the same line of the log
    return text.split("\\n\\nAt:")[0].strip(' "')
