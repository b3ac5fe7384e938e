"""Requests that arrive at given times, one by one or in batches."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence


def exponential_times(count: int, rate: float, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process of `rate` requests/s, in seconds."""
    numbers, at, due = random.Random(seed), 0.0, []
    for _ in range(count):
        at += numbers.expovariate(rate)
        due.append(at)
    return due


def submit_when_due(due: Sequence[float], submit: Callable[[int, float], None]) -> None:
    """Submit each request at its time.

    Args:
        due: times in seconds from the beginning, ascending.
        submit: gets the number of a request and the beginning, by time.perf_counter.
    """
    began = time.perf_counter()
    for request, moment in enumerate(due):
        _sleep_until(began + moment)
        submit(request, began)


def run_batches(
    due: Sequence[float],
    choose: Callable[[Sequence[int]], list[int]],
    run: Callable[[list[int], float], None],
) -> None:
    """Run requests in batches.

    A batch starts when the last one has ended and a request waits.

    Args:
        due: as in `submit_when_due`.
        choose: returns the next batch, at least one of the waiting requests.
        run: gets a batch and the beginning, by time.perf_counter; returns at the end of the batch.
    """
    left = list(range(len(due)))
    began = time.perf_counter()
    while left:
        _sleep_until(began + due[left[0]])
        now = time.perf_counter() - began
        batch = choose([request for request in left if due[request] <= now])
        run(batch, began)
        left = [request for request in left if request not in set(batch)]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))
