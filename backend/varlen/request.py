"""The nouns that pass between layers: a request, its sequences, and the ticket that follows it to its answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The checked tokens of one row of a request.

    Attributes:
        token_ids: `[tokens]` int32, at least one.
        type_ids: `[tokens]` int32, or None for all zero.
    """

    token_ids: Int32Array
    type_ids: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Checked options of a request, the same for all its prompts.

    Attributes:
        normalize: whether embeddings are divided by their length.
        priority: 0 to 9; higher runs sooner.
        deadline_seconds: seconds from arrival after which the answer is useless; None if there is no deadline.
    """

    normalize: bool = False
    priority: int = 0
    deadline_seconds: float | None = None


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request: one or many prompts with their options."""

    prompts: tuple[Prompt, ...]
    options: RequestOptions = DEFAULT_OPTIONS

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(prompt.num_tokens for prompt in self.prompts)


class Reply(Protocol):
    """Where a request's answer goes. Implementations take one answer and ignore any later one."""

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the answer any more. False once answered."""

    def succeed(self, rows: Sequence[Float32Array]) -> None:
        """Answer with one array per sequence, in the request's order."""

    def fail(self, error: Exception) -> None:
        """Answer with an error."""


@dataclass(slots=True, eq=False)
class Ticket:
    """An admitted request on its way through the engine, which alone changes it.

    Attributes:
        request, reply: what came, and where the answer goes.
        arrival: when it was admitted, in seconds of the engine's clock, like all times here.
        deadline: when its answer is worth nothing any more; infinity if it never is.
        seconds: what it was expected to take when it was admitted; counted as waiting until its last sequence runs.
        rows: the answer so far; None where a sequence has not run.
        queued: sequences that have not been taken to run.
        missing: sequences that have not run.
        closed: whether the answer has been given; what is still queued of it is dropped.
    """

    request: Request
    reply: Reply
    arrival: float
    deadline: float = math.inf
    seconds: float = 0.0
    rows: list[Float32Array | None] = field(init=False)
    queued: int = field(init=False)
    missing: int = field(init=False)
    closed: bool = False

    def __post_init__(self) -> None:
        self.queued = self.missing = len(self.request.prompts)
        self.rows = [None] * self.missing


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """One sequence in the queue: what the scheduler sees of it.

    Attributes:
        ticket: the request it belongs to.
        row: its place in that request.
        num_tokens: its length.
        seconds: its expected share of a full batch.
        since: when it came; earlier than that the higher its priority.
        due: when it is to run at the latest, if it can.
    """

    ticket: Ticket
    row: int
    num_tokens: int
    seconds: float = 0.0
    since: float = 0.0
    due: float = 0.0

    @property
    def sequence(self) -> Prompt:
        """The tokens themselves."""
        return self.ticket.request.prompts[self.row]
