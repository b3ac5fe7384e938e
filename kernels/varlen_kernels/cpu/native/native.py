"""What functions that become machine code are made of.

Their code gets addresses and sizes. It uses nothing of numba when it runs: it counts no references and
raises no errors. So it can be stored, and loaded where numba is not (`machine_code`).
"""

from inspect import Parameter, Signature
from typing import Any

import numba
import numba.extending
from llvmlite import ir
from numba.core import cgutils, types
from numba.np import arrayobj

from varlen_kernels.cpu.native.target_cpu import target_cpu

# Before the first function: numba describes the CPU once in a process.
numba.config.CPU_NAME, numba.config.CPU_FEATURES = target_cpu().model, target_cpu().options

_SIZE = ir.IntType(64)
_NUMBER: Any = types.int64
# Bytes of a cache line.
_ALIGNMENT = 64


def inlined(function: Any = None, **options: Any) -> Any:
    """Return a function for compiled code, which becomes a part of its callers.

    A division by zero gives infinity or NaN, or an undefined whole number.

    Args:
        function: the function; without it, a decorator is returned.
        options: more options of `numba.njit`.
    """
    decorate = numba.njit(forceinline=True, _nrt=False, error_model="numpy", **options)
    return decorate if function is None else decorate(function)


# The bodies of compiled functions, by name.
BODIES: dict[str, Any] = {}


def inlined_body(function: Any = None, **options: Any) -> Any:
    """Return the body of a compiled function, see `op.Function`; the arguments as in `inlined`."""
    if function is None:
        return lambda function: inlined_body(function, **options)
    BODIES[function.__name__] = made = inlined(**options)(function)
    return made


# As `inlined`, for functions that return new arrays, whose references numba counts; LLVM finds that there are none.
inlined_view = numba.njit(forceinline=True, _nrt=True, error_model="numpy")


def array_at(kind: Any, context: Any, builder: Any, address: Any, extents: Any) -> Any:
    """Return an array in memory at an address, in instructions."""
    element = context.get_data_type(kind.dtype)
    width = _SIZE(context.get_abi_sizeof(element))
    strides = [width]
    for extent in extents[:0:-1]:
        strides.insert(0, builder.mul(strides[0], extent))
    array = arrayobj.make_array(kind)(context, builder)
    arrayobj.populate_array(
        array,
        data=builder.inttoptr(address, element.as_pointer()),
        shape=extents,
        strides=strides,
        itemsize=width,
        meminfo=None,
    )
    return array._getvalue()


def _view(number: Any, axes: int) -> Any:
    """Return a function for compiled code that returns an array.

    Its arguments are an address and the extent of each axis.
    """
    kind = types.Array(number, axes, "C")

    def declare(_context: Any, *_types: Any) -> Any:
        def generate(context: Any, builder: Any, _declared: Any, values: Any) -> Any:
            return array_at(kind, context, builder, values[0], values[1:])

        return kind(*[_NUMBER] * (1 + axes)), generate

    return intrinsic(declare, 1 + axes)


@numba.extending.intrinsic
def matrix_like(_context, array, _address, _rows, _columns):
    """Return a matrix in memory at an address, of the dtype of an array."""
    kind: Any = types.Array(array.dtype, 2, "C")

    def generate(context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        return array_at(kind, context, builder, values[1], values[2:])

    return kind(array, *[_NUMBER] * 3), generate


def intrinsic(declare: Any, arguments: int) -> Any:
    """Return numba's intrinsic that `declare` declares."""
    # numba reads their number from the signature
    names = ["context", *(f"argument_{i}" for i in range(arguments))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    declare.__signature__ = Signature(parameters)
    return numba.extending.intrinsic(declare)


# vector(address, count) and matrix(address, rows, columns) are arrays.
fp32_vector, fp32_matrix = (_view(types.float32, axes) for axes in (1, 2))
fp64_vector = _view(types.float64, 1)
uint8_vector, uint8_matrix = (_view(types.uint8, axes) for axes in (1, 2))
int32_vector, int32_matrix = (_view(types.int32, axes) for axes in (1, 2))
uint32_vector = _view(types.uint32, 1)
int64_vector = _view(types.int64, 1)

_allocate: Any = types.ExternalFunction("aligned_alloc", _NUMBER(_NUMBER, _NUMBER))
_free: Any = types.ExternalFunction("free", types.void(types.int64))


@inlined
def new_memory(size):
    """Return the address of some bytes; 0 if there are too few."""
    return _allocate(_ALIGNMENT, aligned(size))


@inlined
def free_memory(address):
    """Return memory to the system."""
    _free(address)


@inlined
def aligned(size):
    """Return a number of bytes, rounded up to whole cache lines."""
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


@inlined
def clear(address, size):
    """Write zeros into some bytes."""
    memory = uint8_vector(address, size)
    for i in range(size):
        memory[i] = 0


@numba.extending.intrinsic
def copy_bytes(_context, _destination, _source, _size):
    """Copy bytes between two addresses, which do not overlap."""

    def generate(context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        destination, source, size = values
        pointer = ir.IntType(8).as_pointer()
        both = (builder.inttoptr(each, pointer) for each in (destination, source))
        cgutils.raw_memcpy(builder, *both, size, 1)
        return context.get_dummy_value()

    return types.none(*[_NUMBER] * 3), generate
