"""Threads that send requests, each a function of seed and number."""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Generic, TypeAlias, TypeVar

from .endings import TIMEOUT_SECONDS, End, Ending, Ledger

_Target = TypeVar("_Target")
# Sends one request and returns how it ended.
Attack: TypeAlias = Callable[[random.Random, _Target], Ending]

THREADS = 12


# Least shares of requests by end. A share of 0 asks for one request.
Least: TypeAlias = Mapping[End, float]
ALL_RIGHT: Least = {"right": 1.0}
ALL_REFUSED: Least = {"refused": 1.0}
SOME_RIGHT: Least = {"right": 0.1}
SOME_LEFT: Least = {"left": 0.1}


@dataclass(frozen=True, slots=True)
class Share(Generic[_Target]):
    """A kind of request and its weight among the others.

    Attributes:
        weight: beside the weights of other kinds.
        attack: sends one request.
        least: ends without which the requests prove nothing, see `Ledger.check_least`.
    """

    weight: float
    attack: "Attack[_Target]"
    least: Least = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return self.attack.__name__.lstrip("_")


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
    patience: float = 2 * TIMEOUT_SECONDS,
) -> int:
    """Send requests until a bound is reached, and return how many ended.

    Args:
        target: given to every request.
        mix: the kinds of requests.
        bounds: limits of this stream.
        ledger: gets every end.
        name: name of the stream, with the seed. A request depends only on it and on its own number.
        threads: requests in flight.
        patience: seconds after the last request was sent; the ledger has those without an end then as open.
    """
    numbers = itertools.count()
    until = time.monotonic() + bounds.seconds
    weights = [share.weight for share in mix]

    ended: deque[None] = deque()

    def send_some() -> None:
        while time.monotonic() < until and (number := next(numbers)) < bounds.requests:
            draw = random.Random(f"{name} {number}")
            [share] = draw.choices(mix, weights)
            with ledger.sending(share.kind):
                try:
                    ending = share.attack(draw, target)
                except Exception as error:
                    ending = Ending("wrong", message=f"the client failed: {error!r}")
            ledger.add(f"{name} {number}", share.kind, ending)
            ended.append(None)

    # one that hangs must not hold up the end of the campaign
    senders = [Thread(target=send_some, daemon=True) for _ in range(threads)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(max(0.0, until + patience - time.monotonic()))
    return len(ended)
