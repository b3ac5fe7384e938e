"""Threads that send the requests of a phase, each request a function of seed and number."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from .endings import Ending, Ledger

_Target = TypeVar("_Target")
# Sends one request and returns how it ended.
Attack: TypeAlias = Callable[[random.Random, _Target], Ending]

THREADS = 12


@dataclass(frozen=True, slots=True)
class Share(Generic[_Target]):
    """A kind of request and its weight among the others."""

    weight: float
    attack: "Attack[_Target]"

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return self.attack.__name__


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a stream of requests ends, whatever comes first."""

    seconds: float
    requests: int


def send_all(
    target: _Target,
    mix: "Sequence[Share[_Target]]",
    bounds: Bounds,
    ledger: Ledger,
    *,
    name: str,
    threads: int = THREADS,
) -> int:
    """Send requests until a bound is reached, wait for the last one, and return their number.

    Args:
        target: given to every request.
        mix: the kinds of requests.
        bounds: of this stream.
        ledger: gets every end.
        name: of the stream, with the seed. A request depends on it and on its own number alone.
        threads: requests in flight.
    """
    numbers = itertools.count()
    until = time.monotonic() + bounds.seconds
    weights = [share.weight for share in mix]

    def send_some(_: int) -> int:
        sent = 0
        while time.monotonic() < until and (number := next(numbers)) < bounds.requests:
            draw = random.Random(f"{name} {number}")
            [share] = draw.choices(mix, weights)
            with ledger.sending(share.kind):
                try:
                    ending = share.attack(draw, target)
                except Exception as error:
                    ending = Ending("wrong", message=f"the client failed: {error!r}")
            ledger.add(f"{name} {number}", share.kind, ending)
            sent += 1
        return sent

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(send_some, range(threads)))
