"""Routers: each chooses a replica for a request by what a proxy knows.

A proxy knows the requests that it has sent and that are not answered. What a replica measures it knows only from the
last scrape of its metrics.

Source of two choices: Mitzenmacher 2001, IEEE TPDS 12(10).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]


class Routing(str, Enum):
    """How a router chooses a replica."""

    random = "random"
    round_robin = "round_robin"
    least_requests = "least_requests"
    two_choices = "two_choices"
    queued_tokens = "queued_tokens"


@dataclass(frozen=True, slots=True)
class ReplicaLoads:
    """What a router knows of the replicas; the owner updates the arrays.

    Attributes:
        is_up: [replicas] bool, replicas that take requests; at least one.
        open_requests: [replicas], number of requests sent and not answered.
        queued_tokens: returns the waiting tokens of each replica at the last scrape, [replicas].
    """

    is_up: npt.NDArray[np.bool_]
    open_requests: Counts
    queued_tokens: Callable[[], Counts]


# Returns the number of the replica that gets the next request.
Router: TypeAlias = Callable[[], int]


def new_router(routing: Routing, loads: ReplicaLoads, seed: int) -> Router:
    """Return a router; `seed` fixes its random choices."""
    numbers = random.Random(seed)
    last = -1

    def up() -> Counts:
        return np.flatnonzero(loads.is_up)

    def at_random() -> int:
        return int(numbers.choice(up()))

    def in_turn() -> int:
        nonlocal last
        replicas = up()
        after = int(np.searchsorted(replicas, last, side="right"))
        last = int(replicas[after % len(replicas)])
        return last

    def least(values: Counts, replicas: Counts) -> int:
        """Return a replica of the least value; ties are broken at random."""
        own = values[replicas]
        return int(numbers.choice(replicas[own == own.min()]))

    def of_two() -> int:
        replicas = up()
        drawn = numbers.sample(range(len(replicas)), min(2, len(replicas)))
        return least(loads.open_requests, replicas[drawn])

    routers: dict[Routing, Router] = {
        Routing.random: at_random,
        Routing.round_robin: in_turn,
        Routing.least_requests: lambda: least(loads.open_requests, up()),
        Routing.two_choices: of_two,
        Routing.queued_tokens: lambda: least(loads.queued_tokens(), up()),
    }
    return routers[routing]
