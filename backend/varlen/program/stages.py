"""A program cut into stages, which hand values to the next one.

A cut lies before the first op that reads a weight of a layer. What crosses it is found from the list of ops: the values
that ops before it write and ops behind it read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from varlen.program.program import Op, Program, Value


@dataclass(frozen=True, slots=True)
class Stage:
    """The place of a process in a pipeline."""

    number: int = 0
    count: int = 1

    @property
    def is_last(self) -> bool:
        """Whether it leads."""
        return self.number == self.count - 1


NO_STAGES = Stage()


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The part of a program that one stage runs.

    Attributes:
        program: its ops; the values that it makes and hands on are its outputs, unless it is the last stage.
        received: values that the stage before it hands over.
        sent: values that it hands to the next stage. It may have received some of them.
    """

    program: Program
    received: tuple[Value, ...]
    sent: tuple[Value, ...]

    @property
    def passed_on(self) -> tuple[Value, ...]:
        """Values that it hands on as it has received them."""
        return tuple(value for value in self.sent if value in self.received)


def layer_starts(program: Program, layer_of: Mapping[int, int], count: int) -> list[int]:
    """Return the number of the first op that reads a weight of each layer.

    Args:
        layer_of: the layer of each weight, by the weight's id.
    """
    starts: dict[int, int] = {}
    for number, op in enumerate(program.ops):
        for weight in op.weights:
            if (layer := layer_of.get(id(weight))) is not None:
                starts.setdefault(layer, number)
    found = [starts[layer] for layer in range(count)]
    assert found == sorted(set(found)), "the layers do not run one after another"
    return found


def cut_program(
    program: Program, starts: Sequence[int], bounds: Sequence[int]
) -> list[StageProgram]:
    """Return the part of each stage.

    Args:
        bounds: first layer of each stage, and the number of layers.
    """
    cuts = [0, *(starts[bound] for bound in bounds[1:-1]), len(program.ops)]
    crossing = [_crossing(program, cut) for cut in cuts[:-1]] + [()]
    return [
        _part(program.ops[first:last], received, sent, program.outputs)
        for (first, last), (received, sent) in zip(pairwise(cuts), pairwise(crossing), strict=True)
    ]


def balanced_bounds(costs: Sequence[float], starts: Sequence[int], stages: int) -> list[int]:
    """Return the bounds of layers with which the most expensive stage costs least.

    Each stage has one layer at least.

    Args:
        stages: number of stages, at most as many as layers.

    Returns:
        First layer of each stage, and the number of layers.
    """
    before = list(accumulate(costs, initial=0.0))
    layers = len(starts)
    # cost of all ops before a stage that begins with this layer
    at = [0.0, *(before[start] for start in starts[1:]), before[-1]]
    # by the end of the stages so far: cost of the most expensive one, and their bounds
    best = {last: (at[last], [0, last]) for last in range(1, layers + 1)}
    for _ in range(stages - 1):
        best = {
            last: min(
                (max(worst, at[last] - at[first]), [*bounds, last])
                for first, (worst, bounds) in best.items()
                if first < last
            )
            for last in range(min(best) + 1, layers + 1)
        }
    return best[layers][1]


def _crossing(program: Program, cut: int) -> tuple[Value, ...]:
    """Return the values that ops before a cut write, and that are read behind it."""
    read = {value for op in program.ops[cut:] for value in op.reads} | set(program.outputs)
    return tuple(result for op in program.ops[:cut] for result in op.results if result in read)


def _part(
    ops: Sequence[Op],
    received: tuple[Value, ...],
    sent: tuple[Value, ...],
    outputs: tuple[Value, ...],
) -> StageProgram:
    made = {result for op in ops for result in op.results}
    return StageProgram(
        Program(ops, [value for value in (sent or outputs) if value in made]), received, sent
    )
