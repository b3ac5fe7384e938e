"""Twice what a system can serve, for minutes, each request with a deadline: what is refused, when, and what is kept."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

from varlen_bench.harness.resident import model_process, resident_bytes
from varlen_bench.serving.arrivals import Mix
from varlen_bench.serving.rows import Row
from varlen_bench.serving.served import Load, Served
from varlen_bench.serving.systems import System

TIMES, DEADLINE_MS = 2.0, 500
_CLOSED_SECONDS, _IN_FLIGHT = 4.0, 8
_LOOK_SECONDS = 1.0
# Of the looks at memory, those that come first, while queues fill.
_FILLING = 0.1
# Nobody would wait longer in a queue that refuses nothing.
_OUTSTANDING_SECONDS = 10.0


def overload_rows(
    served: Served, one: System, mix: Mix, seconds: float, seed: int
) -> Iterator[Row]:
    """Yield the rows of a system's capacity and of twice that, for so many seconds."""
    row, point = served.saturate(one, mix, in_flight=_IN_FLIGHT, seconds=_CLOSED_SECONDS, seed=seed)
    yield row
    load = Load(
        mix,
        rate=TIMES * max(point.served, 1.0),
        seconds=seconds,
        seed=seed,
        outstanding=int(_OUTSTANDING_SECONDS * max(point.served, 1.0)),
        deadline_ms=DEADLINE_MS,
    )
    with ResidentLooks(model_process(served.server.pid, one.name)) as looks:
        row, _ = served.load(one, "overload", load)
    yield replace(row, rss_flatness=looks.flatness())


class ResidentLooks:
    """What another process has resident, looked at every second inside a `with`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.samples: list[int] = []

    def __enter__(self) -> ResidentLooks:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def flatness(self) -> float | None:
        """Return how far the samples are apart, as a share of their median; the first tenth does not count."""
        samples = self.samples[int(_FILLING * len(self.samples)) :]
        if not samples:
            return None
        return (max(samples) - min(samples)) / statistics.median(samples)

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                self.samples.append(resident_bytes(self._pid))
            except OSError:
                return
