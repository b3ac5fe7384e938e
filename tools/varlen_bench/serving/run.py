"""The order of events: each system on a server of its own, one after another; then two of them in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np

from varlen_bench.harness.worker import WorkerError
from varlen_bench.peers import engines
from varlen_bench.serving import perf
from varlen_bench.serving.arrivals import Mix, token_ids
from varlen_bench.serving.figures import GOAL
from varlen_bench.serving.overload import overload_rows
from varlen_bench.serving.plan import LIGHT, PAIRED_LOADS, Effort, Plan, most_outstanding
from varlen_bench.serving.repository import Checkpoint
from varlen_bench.serving.rows import Row
from varlen_bench.serving.search import Search
from varlen_bench.serving.served import Generator, Load, Reference, Served
from varlen_bench.serving.systems import DYNAMIC_BATCHER, OURS, TOKEN_BUDGET, System, system
from varlen_tools.local_server import ServerError

LEAST_COSINE = 0.999
# Requests in flight of a closed loop.
_IN_FLIGHT = 8
_CHECKED_REQUESTS = 8
# What a server or its generator can end in; anything else is a fault of the benchmark.
_FAULTS = (ServerError, WorkerError, RuntimeError, OSError)
_TOO_MUCH = 2.0
_CROSS_CHECK_LOAD, _CROSS_CHECK_TIMES = 0.5, 1.5

Say: TypeAlias = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and how.

    Attributes:
        systems: in the order of their turns.
        mixes: of lengths.
        checkpoint: that all serve.
        vocabulary: number of its token ids.
        plan: what gets how much time.
        seed: of arrivals, lengths and ids.
    """

    systems: Sequence[System]
    mixes: Sequence[Mix]
    checkpoint: Checkpoint
    vocabulary: int
    plan: Plan
    seed: int


class WrongAnswersError(RuntimeError):
    """A system answers other vectors than the checkpoint gives."""


@dataclass(slots=True)
class Known:
    """What is known of one mix by now, in requests/s.

    Attributes:
        saturated: of the system that served most.
        best_peer: that the best peer sustains.
        capacities: that closed loops got, by system.
    """

    saturated: float = 0.0
    best_peer: float = 0.0
    capacities: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Lab:
    """One run: the settings, and what it has learnt so far.

    Attributes:
        settings: of the run.
        folder: where servers keep what they measure of this machine.
        reference: what every system has to answer.
        say: told what is going on.
        known: by mix.
    """

    settings: Settings
    folder: Path
    reference: Reference
    say: Say
    known: dict[str, Known] = field(default_factory=dict)

    def measure(self) -> Iterator[list[Row]]:
        """Yield the rows of each system, of the comparison in turns, and of perf_analyzer."""
        self.known = {mix.name: Known() for mix in self.settings.mixes}
        for one in self.settings.systems:
            yield list(self._guarded([one], self._system_rows))
        if {TOKEN_BUDGET, OURS} <= {one.name for one in self.settings.systems}:
            yield from self.measure_paired(self.settings.plan.turns)

    def measure_paired(self, turns: int) -> Iterator[list[Row]]:
        """Yield the rows of two policies by turns, if any time is planned for them."""

        def rows(systems: list[System]) -> Iterator[Row]:
            return self._paired_rows(systems, turns)

        if self.settings.plan.paired_seconds:
            yield list(self._guarded([system(TOKEN_BUDGET), system(OURS)], rows))

    def measure_overload(self, seconds: float) -> Iterator[list[Row]]:
        """Yield the rows of each system under twice its capacity, for so many seconds on each mix."""

        def rows(systems: list[System]) -> Iterator[Row]:
            (one,) = systems
            with self._serving(systems) as served:
                self._check(served, one)
                for mix in self.settings.mixes:
                    self.say(f"{one.name}: {mix.label}, overload")
                    yield from overload_rows(served, one, mix, seconds, self.settings.seed)

        for one in self.settings.systems:
            self.say(f"{one.name}: starting")
            yield list(self._guarded([one], rows))

    @contextmanager
    def _serving(self, systems: Sequence[System]) -> Iterator[Served]:
        """Yield a server of these systems, with a generator of its own.

        Raises:
            ServerError: it does not get ready.
        """
        generator = Generator(self.folder / "generator.log", self.settings.vocabulary)
        try:
            with Served(systems, self.settings.checkpoint, generator, self.folder) as served:
                yield served
        finally:
            generator.close()

    def _check(self, served: Served, one: System) -> float:
        """Return the least cosine of a system's answers.

        Raises:
            WrongAnswersError: it is too small.
        """
        cosine = served.check(one, self.reference)
        if not cosine >= LEAST_COSINE:
            raise WrongAnswersError(
                f"answers are wrong: cosine {cosine:.4f}; allowed: {LEAST_COSINE}"
            )
        return cosine

    def _guarded(
        self, systems: list[System], rows: Callable[[list[System]], Iterator[Row]]
    ) -> Iterator[Row]:
        """Yield rows as long as they come; what ends them becomes one."""
        from tritonclient.utils import InferenceServerException

        try:
            yield from rows(systems)
        except (*_FAULTS, InferenceServerException) as error:
            name = " and ".join(one.name for one in systems)
            yield Row("", name, "failed", note=f"did not run on: {reason(error)}")

    def _system_rows(self, systems: list[System]) -> Iterator[Row]:
        (one,) = systems
        self.say(f"{one.name}: starting")
        with self._serving(systems) as served:
            cosine = self._check(served, one)
            for mix in self.settings.mixes:
                self.say(f"{one.name}: {mix.label}")
                for row in self._mix_rows(served, one, mix):
                    yield replace(row, cosine_min=cosine) if row.kind == "result" else row
            if one.name == OURS:
                yield from self._cross_check(served, one)

    def _mix_rows(self, served: Served, one: System, mix: Mix) -> Iterator[Row]:
        """Yield the rows of one system on one mix, its result last."""
        known, seed = self.known[mix.name], self.settings.seed
        effort = self.settings.plan.key if one.is_key else self.settings.plan.other
        row, capacity = self._capacity(served, one, mix)
        yield row
        known.capacities[one.name] = capacity
        known.saturated = max(known.saturated, capacity)
        if _is_hopeless(one, capacity, known):
            effort = self.settings.plan.hopeless
        search = Search(capacity, effort.steps)
        for row in self._search_rows(served, one, mix, search, effort):
            yield row
        most = Load(
            mix,
            rate=_TOO_MUCH * known.saturated,
            seconds=effort.most_seconds,
            seed=seed,
            outstanding=most_outstanding(capacity),
        )
        row, point = served.load(one, "most", most)
        yield row
        known.saturated = max(known.saturated, point.served)
        if not one.is_ours:
            known.best_peer = max(known.best_peer, search.sustained)
        yield Row(
            mix.label,
            one.name,
            "result",
            rss_mib=served.resident(one) / (1 << 20),
            sustained=search.sustained if effort.steps else None,
            saturated=point.served,
        )

    def _capacity(self, served: Served, one: System, mix: Mix) -> tuple[Row, float]:
        """Return the row of a closed loop, and the requests/s that it got now: a shared machine's speed changes."""
        efforts = self.settings.plan
        row, point = served.saturate(
            one,
            mix,
            in_flight=_IN_FLIGHT,
            seconds=(efforts.key if one.is_key else efforts.other).closed_seconds,
            seed=self.settings.seed,
        )
        # a system so slow that no answer fell into the measured seconds
        return row, point.served or point.ok / (point.seconds + _IN_FLIGHT)

    def _search_rows(
        self, served: Served, one: System, mix: Mix, search: Search, effort: Effort
    ) -> Iterator[Row]:
        """Yield the rows of a light load and of those on the way to the largest that is sustained."""
        number = 0
        rate: float | None = LIGHT * search.capacity
        while rate is not None:
            load = Load(
                mix,
                rate=rate,
                seconds=effort.seconds_at(rate) if number else effort.seconds,
                seed=self.settings.seed + number,
                outstanding=most_outstanding(search.capacity),
                late_seconds=GOAL.p99_ms / 1000,
                late_share=0.01,
            )
            row, point = served.load(one, "load", load)
            yield row
            search.record(rate, is_sustained=GOAL.is_met(point), is_step=number > 0)
            rate, number = search.next_rate(), number + 1

    def _cross_check(self, served: Served, one: System) -> Iterator[Row]:
        """Yield the rows of one load as our generator and perf_analyzer see it."""
        mix = self.settings.mixes[0]
        capacity = self.known[mix.name].capacities[one.name]
        load = Load(
            mix,
            rate=_CROSS_CHECK_LOAD * capacity,
            # its window ends with a request, which is a large part of a short one
            seconds=_CROSS_CHECK_TIMES * self.settings.plan.key.seconds,
            seed=self.settings.seed,
            outstanding=most_outstanding(capacity),
        )
        self.say(f"{one.name}: beside perf_analyzer")
        yield served.load(one, "load", load)[0]
        try:
            yield perf.cross_check(served.address, one.name, load, self.settings.vocabulary)
        except (perf.AnalyzerError, ServerError) as error:
            yield Row(mix.label, one.name, "failed", note=f"perf_analyzer: {reason(error)}")

    def _paired_rows(self, systems: list[System], turns: int) -> Iterator[Row]:
        """Yield the rows of two systems on one server under the same arrivals, by turns: A B, B A and so on."""
        self.say(" and ".join(one.name for one in systems) + ": by turns")
        with self._serving(systems) as served:
            for one in systems:
                self._check(served, one)
            for mix in self.settings.mixes:
                for turn in range(turns):
                    order = systems[::-1] if turn % 2 else systems
                    self.say(f"{mix.label}: turn {turn + 1} of {turns}")
                    row, capacity = self._capacity(served, systems[0], mix)
                    yield row
                    for share in PAIRED_LOADS:
                        load = Load(
                            mix,
                            rate=share * capacity,
                            seconds=self.settings.plan.paired_seconds,
                            seed=self.settings.seed + turn,
                            outstanding=most_outstanding(capacity),
                        )
                        for one in order:
                            yield replace(served.load(one, "paired", load)[0], turn=turn)


def _is_hopeless(one: System, capacity: float, known: Known) -> bool:
    """Return whether a peer serves less at most than another one sustains: it cannot be the best."""
    return not one.is_ours and one.name != DYNAMIC_BATCHER and capacity < known.best_peer


def reference(settings: Settings) -> Reference:
    """Return requests of all lengths and their vectors: transformers, fp32, each alone and so unpadded."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    checkpoint = settings.checkpoint
    longest = max(max(mix.lengths) for mix in settings.mixes)
    lengths = [max(1, longest * (i + 1) // _CHECKED_REQUESTS) for i in range(_CHECKED_REQUESTS)]
    ids = token_ids(lengths, settings.vocabulary, settings.seed)
    embed = engines.load(
        "transformers", checkpoint.folder, checkpoint.folder, "fp32", threads=checkpoint.threads
    )
    return Reference(ids, np.concatenate([embed([one]) for one in ids]))


def reason(error: Exception) -> str:
    """Return the line of an error that says most: the server's own reason where it has told one."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "failed to load '" in line and ": " in line]
    line = told[0].split("version 1: ")[-1] if told else next(iter(lines), type(error).__name__)
    # a Python traceback follows the reason, on the same line of the log
    return line.split("\\n\\nAt:")[0].strip(' "')


@contextmanager
def lab(settings: Settings, say: Say) -> Iterator[Lab]:
    """Yield a lab with a folder for what its servers measure of this machine."""
    say("vectors that every system has to answer")
    wanted = reference(settings)
    with TemporaryDirectory(prefix="varlen-lab-") as folder:
        yield Lab(settings, Path(folder), wanted, say)
