"""Runs an op as its compiled functions."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from varlen_kernels.cpu.call_rules import flat, rules_of, shape_of
from varlen_kernels.cpu.calls import call_each, contiguous, extent


def run_op(
    kernel: str, operands: Sequence[Any], results: Sequence[Tensor], **attributes: Any
) -> None:
    """Write the results of an op.

    Args:
        kernel: its name.
        operands: all of its operands, None for those that are left out.
        results: tensors that it writes.
        attributes: its attributes.

    Raises:
        TypeError: it has no compiled function for tensors of these dtypes.
    """
    with contiguous(results) as written:
        tensors = [*flat(operands), *written]
        shapes = [shape_of(each) for each in tensors]
        for rule in rules_of(kernel, operands):
            given = rule.of_operands(tensors)
            entry = rule.entry_for([None if each is None else each.dtype for each in given])
            if entry is None:
                raise TypeError(f"{kernel} has no compiled function for these dtypes")
            constants = rule.constants(attributes, shapes)
            units, multiplications = rule.work([extent(each) for each in given], constants)
            call_each(entry, [given], constants, units=units, multiplications=multiplications)
