"""Functions that become machine code: they read arguments from memory and run a body.

The table of ops says how arguments lie in memory (`op.Function`); `machine_code` compiles and loads the functions.
"""

from collections.abc import Sequence
from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import types

# each has bodies of compiled functions
from varlen_kernels.cpu.bodies import (  # noqa: F401
    attention,
    beam,
    block_panels,
    groups,
    int8_panels,
    paged,
    panels,
    ranks,
    rows,
    sampling,
)
from varlen_kernels.cpu.calls.call_code import run_alone, run_shared
from varlen_kernels.cpu.native.native import BODIES, array_at, inlined
from varlen_kernels.functions import FUNCTIONS
from varlen_kernels.op import Function

_SIZE = ir.IntType(64)
# Types of the numbers of arrays, by letter. Numbers of bf16 are uint16.
_NUMBERS: dict[str, Any] = {
    "f": types.float32,
    "e": types.float64,
    "?": types.uint8,
    "b": types.int8,
    "u": types.uint8,
    "i": types.int32,
    "I": types.uint32,
    "H": types.uint16,
    "l": types.int64,
}
_CONSTANTS: dict[str, Any] = {
    "whole": types.int64,
    "real": types.float32,
    "flag": types.boolean,
    "address": types.int64,
}
_AXES = {"vector": 1, "boxes": 3}


def entry_of(name: str) -> Any:
    """Return numba's function of whole numbers for one of `functions.ENTRIES`.

    It gets the address of its arguments, its first unit, and the one after its last.
    """
    if name in ("run_alone", "run_shared"):
        return run_alone if name == "run_alone" else run_shared
    base = name.removesuffix("_bf16")
    function = FUNCTIONS[base]
    body = BODIES[function.body]
    wanted = body.py_func.__code__.co_varnames[2 : body.py_func.__code__.co_argcount]
    read = _reader(function, wanted, types.float32 if base == name else types.uint16)

    @inlined
    def entry(arguments, first, last):
        return body(first, last, *read(arguments))

    return entry


def _reader(function: Function, wanted: Sequence[str], of_model: Any) -> Any:
    """Return a function for compiled code that returns some arguments from memory, as a tuple.

    Args:
        function: says how they lie there.
        of_model: numba's type of the numbers of a model.
    """
    kinds = function.kinds

    def type_of(name: str) -> Any:
        kind = kinds[name]
        if kind.form in _CONSTANTS:
            return _CONSTANTS[kind.form]
        number = _NUMBERS.get(kind.letter, of_model)
        return types.Array(number, _AXES.get(kind.form, 2), "C")

    result: Any = types.Tuple([type_of(name) for name in wanted])  # type: ignore[attr-defined]

    @numba.extending.intrinsic
    def read(_context, _arguments):
        def generate(context: Any, builder: Any, _declared: Any, values: Any) -> Any:
            def number(place: int, kind: Any = _SIZE) -> Any:
                pointer = builder.inttoptr(values[0], kind.as_pointer())
                return builder.load(builder.gep(pointer, [_SIZE(place)]))

            def constant(name: str) -> Any:
                place = 3 * len(function.tensors) + function.constants.index(name)
                form = kinds[name].form
                if form == "real":
                    return builder.fptrunc(number(place, ir.DoubleType()), ir.FloatType())
                whole = number(place)
                return builder.icmp_signed("!=", whole, _SIZE(0)) if form == "flag" else whole

            def tensor(name: str) -> Any:
                place = 3 * function.tensors.index(kinds[name].of or name)
                return number(place), number(place + 1), number(place + 2)

            def divided(whole: Any, part: Any) -> Any:
                is_zero = builder.icmp_signed("==", part, _SIZE(0))
                return builder.sdiv(whole, builder.select(is_zero, _SIZE(1), part))

            def value(name: str) -> Any:
                kind = kinds[name]
                if name in function.constants:
                    return constant(name)
                address, count, columns = tensor(name)
                if kind.form == "address":
                    return address
                extents: list[Any] = [count, columns]
                total = builder.mul(count, columns)
                if kind.form == "vector":
                    extents = [total]
                elif kind.form == "row":
                    is_none = builder.icmp_signed("==", total, _SIZE(0))
                    extents = [builder.select(is_none, _SIZE(0), _SIZE(1)), total]
                elif kind.form == "heads":
                    extents = [constant(kind.by), columns]
                elif kind.form == "by":
                    width = constant(kind.by)
                    extents = [divided(total, width), width]
                elif kind.form == "boxes":
                    width = tensor(kind.by)[2]
                    extents = [count, width, divided(columns, width)]
                return array_at(type_of(name), context, builder, address, extents)

            return context.make_tuple(builder, result, [value(name) for name in wanted])

        return result(types.int64), generate

    return read
