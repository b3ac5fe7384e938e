"""Runs an op as its compiled functions."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from varlen_kernels.cpu.call_rules import flat, rules_of, shape_of
from varlen_kernels.cpu.calls import copy_back, extent_of, run_function
from varlen_kernels.cpu.machine_code import address_of


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
    written = [each.contiguous() for each in results]
    tensors = [*flat(operands), *written]
    shapes = [shape_of(each) for each in tensors]
    for rule in rules_of(kernel, operands):
        given = rule.of_operands(tensors)
        entry = rule.entry_for([each if each is None else each.dtype for each in given])
        if entry is None:
            raise TypeError(f"{kernel} has no compiled function for these dtypes")
        constants = rule.constants(attributes, shapes)
        extents = [(0, 0) if each is None else extent_of(each.shape) for each in given]
        units, multiplications = rule.work(extents, constants)
        run_function(address_of(entry), [given], extents, constants, units, multiplications)
    copy_back(written, results)
