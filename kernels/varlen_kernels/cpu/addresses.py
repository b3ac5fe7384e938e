"""Addresses of elements of matrices, in instructions of functions that numba compiles."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

_BYTE, _SIZE = ir.IntType(8), ir.IntType(64)


def element_address(
    context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any
) -> Any:
    """Return the address of an element as one of bytes.

    Args:
        context, builder: numba's, which write the instructions.
        array_type, array: a matrix whose columns are adjacent.
        row, column: numbers of 64 bits.
    """
    struct = context.make_array(array_type)(context, builder, array)
    row_bytes = cgutils.unpack_tuple(builder, struct.strides, 2)[0]
    width = ir.Constant(_SIZE, array_type.dtype.bitwidth // 8)
    offset = builder.add(builder.mul(row, row_bytes), builder.mul(column, width))
    return moved(builder, struct.data, offset, _BYTE)


def moved(builder: Any, address: Any, offset: Any, element: Any) -> Any:
    """Return the address some bytes further, as one of elements of a type."""
    further = builder.gep(builder.bitcast(address, _BYTE.as_pointer()), [offset])
    return builder.bitcast(further, element.as_pointer())
