"""A recording: ops that are appended one by one to a `Program`.

Each op returns symbolic values. A dimension is any name that batches give a size to: tokens, sequences, blocks,
logit_rows, ...
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch

from varlen.memory.usage import Shape, Size
from varlen.program.program import Attribute, Op, Operand, Program, State, Value
from varlen_kernels.op_table import OPS

# Axes as a model writes them: a dimension by its name, `Size(1, sequences=1)`, or a fixed length.
Axes: TypeAlias = Sequence[int | str | Size]

_NO_ATTRIBUTES: Mapping[str, Attribute] = {}
_Declared = TypeVar("_Declared", Value, State)


class Recording:
    """The ops of a program so far, and the tensors that they may read."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._declared: dict[str, Value | State] = {}

    def input(self, name: str, shape: Axes, dtype: torch.dtype) -> Value:
        """Declare a tensor that each batch brings; the same declaration again returns the same value.

        Raises:
            ValueError: the name was declared as something else.
        """
        return self._declare(Value(name, _symbolic(shape), dtype))

    def state(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> State:
        """Declare a tensor that outlives runs; the same declaration again returns the same state.

        Raises:
            ValueError: the name was declared as something else.
        """
        return self._declare(State(name, shape, dtype))

    def call(
        self,
        kernel: str,
        operands: Sequence[Operand],
        results: Sequence[tuple[Axes, torch.dtype]],
        *,
        writes: Sequence[State] = (),
        in_place: Sequence[int] | None = None,
        attributes: Mapping[str, Attribute] = _NO_ATTRIBUTES,
    ) -> tuple[Value, ...]:
        """Append one op and return its results.

        Args:
            kernel: name of the function that it calls.
            results: shape and dtype of each.
            writes: the states among the operands that it changes.
            in_place: see `Op`; None takes the one of the table of ops.

        Raises:
            ValueError: an operand was not recorded here, or `writes` or `in_place` do not fit the operands.
        """
        if in_place is None:
            in_place = OPS[kernel].in_place if kernel in OPS else ()
        self._check(kernel, operands, writes, in_place)
        names = [f"{len(self._ops)}:{kernel}"]
        if len(results) > 1:
            names = [f"{names[0]}.{position}" for position in range(len(results))]
        made = tuple(
            Value(name, _symbolic(shape), dtype)
            for name, (shape, dtype) in zip(names, results, strict=False)
        )
        self._declared.update((value.name, value) for value in made)
        self._ops.append(
            Op(kernel, tuple(operands), attributes, made, tuple(writes), tuple(in_place))
        )
        return made

    def finish(self, *outputs: Value) -> Program:
        """Return the program that computes `outputs`, results of its ops.

        Raises:
            ValueError: an output is not the result of an op.
        """
        results = {result for op in self._ops for result in op.results}
        for value in outputs:
            if value not in results:
                raise ValueError(f'the output "{value.name}" is not the result of an op')
        return Program(self._ops, outputs)

    def record(self, op: str, *operands: Operand, **attributes: Attribute) -> Value:
        """Append an op with one result; see `record_all`."""
        (result,) = self.record_all(op, operands, attributes)
        return result

    def record_all(
        self,
        op: str,
        operands: Sequence[Operand],
        attributes: Mapping[str, Attribute],
        *,
        writes: Sequence[State] = (),
    ) -> tuple[Value, ...]:
        """Append an op; its row in `op_table` declares its arguments and results; see `call`.

        Raises:
            TypeError: an argument is missing, or the op takes no such argument.
            ValueError: see `call`.
        """
        row = OPS[op]
        arguments = row.named(operands, attributes)
        results = row.result(arguments) if row.result else ()
        return self.call(op, operands, results, writes=writes, attributes=attributes)

    def _declare(self, declared: _Declared) -> _Declared:
        if self._declared.setdefault(declared.name, declared) != declared:
            raise ValueError(f'"{declared.name}" is declared twice, with different meanings')
        return declared

    def _check(
        self,
        kernel: str,
        operands: Sequence[Operand],
        writes: Sequence[State],
        in_place: Sequence[int],
    ) -> None:
        for operand in operands:
            if isinstance(operand, Value | State) and self._declared.get(operand.name) != operand:
                raise ValueError(f'{kernel} reads "{operand.name}", which another recorder made')
        states = {operand for operand in operands if isinstance(operand, State)}
        for state in writes:
            if state not in states:
                raise ValueError(f'{kernel} writes "{state.name}", which is not among its operands')
        if len(set(in_place)) < len(in_place) or not set(in_place) <= set(range(len(operands))):
            raise ValueError(f"{kernel} has in_place {in_place}; allowed: one operand per result")


def _symbolic(shape: Axes) -> Shape:
    return tuple(Size(**{axis: 1}) if isinstance(axis, str) else axis for axis in shape)
