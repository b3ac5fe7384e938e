"""Usage records of one request by its length, from the paper or from our own encoders, as planners take them."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from varlen.execution.packing import dims_of
from varlen.memory.layout import Layout, ShapePlan
from varlen.memory.planner import Plan, Rules, plan
from varlen.memory.usage import Buffer, conflicts
from varlen_tools import paper_records, weightless
from varlen_tools.bench_kernels.grid import FULL

_ALIGNMENT = 64

# Returns what a request of so many tokens needs. Lifetimes are those of the program, whatever the length.
BuffersOf: TypeAlias = Callable[[int], Sequence[Buffer]]


class Records:
    """What requests of one program are planned from; a request is one sequence.

    Attributes:
        name: of the program.
    """

    def __init__(self, name: str, buffers_of: BuffersOf) -> None:
        self.name = name
        self._buffers_of = buffers_of
        self._conflicts = conflicts([buffer.lifetimes for buffer in buffers_of(1)])
        self._in_one_chunk: dict[int, ShapePlan] = {}

    def plan(self, length: int, chunks: Sequence[int], rules: Rules) -> Plan:
        """Return a plan into a list of chunks."""
        sizes = [buffer.size.at(dims_of([length])) for buffer in self._buffers_of(length)]
        return plan(sizes, self._conflicts, chunks=chunks, rules=rules)

    def in_one_chunk(self, length: int) -> ShapePlan:
        """Return the plan that the arena makes."""
        if length not in self._in_one_chunk:
            layout = Layout(self._buffers_of(length), _ALIGNMENT)
            self._in_one_chunk[length] = layout.plan(dims_of([length]))
        return self._in_one_chunk[length]


def paper() -> Records:
    """Return the paper's records, a buffer each."""
    return Records("paper", _paper_buffers)


def all_records() -> Iterator[Records]:
    """Yield the paper's records, and those of our encoders, folded as they are served."""
    yield paper()
    for shape in FULL.encoders:
        yield Records(shape.name, _whatever_the_length(weightless.record(shape).buffers))


def _paper_buffers(length: int) -> Sequence[Buffer]:
    return [Buffer((usage,), usage.size) for usage in paper_records.usages(1, length)]


def _whatever_the_length(buffers: Sequence[Buffer]) -> BuffersOf:
    return lambda _: buffers
