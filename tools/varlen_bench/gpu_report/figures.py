"""Rows of single figures, as most stages measure them."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch

from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import Spread
from varlen_bench.kernels.machine import Budget, Machine

Figure: TypeAlias = dict[str, Cell]
Measure: TypeAlias = Callable[[Machine], Iterator[Figure]]

# Unit of a figure that is wrong unless it is 0.
MUST_BE_0 = "must be 0"
_WARM_UPS, _PASSES = 3, 40


def figure(part: str, case: str, name: str, value: float | None, unit: str) -> Figure:
    """Return the row of a figure; None if it was not measured."""
    return {"part": part, "case": case, "figure": name, "value": value, "unit": unit}


def device_time(start: Callable[[], object]) -> float:
    """Return the median microseconds of the work that `start` puts on the stream."""
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        for _ in range(_PASSES)
    ]
    for _ in range(_WARM_UPS):
        start()
    for began, ended in events:
        began.record()
        start()
        ended.record()
    torch.cuda.synchronize()
    return Spread.of([1e3 * began.elapsed_time(ended) for began, ended in events]).median


def within(budget: Budget, rows: Iterable[Figure]) -> Iterator[Figure]:
    """Yield rows until the budget is spent."""
    for row in rows:
        yield row
        if not budget.allows():
            print(budget.spent_note)
            return
