"""How an op of a program runs as functions of `entries`.

A rule names what a function gets, and how its work is split.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from varlen_kernels.cpu.epilogues import ACTIVATIONS, NO_ACTIVATION
from varlen_kernels.cpu.panels import BLOCK

# Rows and columns of a tensor: axes after the first count as one.
Extent: TypeAlias = tuple[int, int]
Attributes: TypeAlias = Mapping[str, Any]
Shapes: TypeAlias = Sequence[tuple[Any, ...]]

DTYPES: Mapping[str, torch.dtype] = {
    "f": torch.float32,
    "b": torch.int8,
    "u": torch.uint8,
    "i": torch.int32,
    "l": torch.int64,
}

# Multiplications that take as long as one number of a norm, an activation or a copy.
_OF_NUMBER = 32
# Multiplications that take as long as reading a number of a weight, or one head of a sequence's cache.
_OF_WEIGHT, _OF_HEAD = 8, 1 << 16


class Work(NamedTuple):
    """The work of a function.

    Attributes:
        units: number of units that threads may share.
        multiplications: the multiplications of all units, or as many as take the same time.
    """

    units: int
    multiplications: int


class CallRule(NamedTuple):
    """A function that runs an op, or a part of it.

    Attributes:
        entry: name of the function in `entries`.
        tensors: places, among the op's operands and results, of the tensors that the function gets; None for a tensor
            that it does without. Each element of a tuple has a place of its own.
        dtypes: their dtypes, a letter of `DTYPES` each.
        work: the work, given the extents of these tensors and the constants.
        constants: numbers that it gets after the tensors, given the op's attributes and the shapes of operands and
            results, in which a number stands by itself.
    """

    entry: str
    tensors: tuple[int | None, ...]
    dtypes: str
    work: Callable[[Sequence[Extent], Sequence[float]], Work]
    constants: Callable[[Attributes, Shapes], Sequence[float]]


def _rows(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    rows, columns = extents[-1]
    return Work(rows, _OF_NUMBER * rows * columns)


def _panels(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    (rows, _hidden), (panels, numbers) = extents[:2]
    return Work(-(-rows // BLOCK) * panels, (rows + _OF_WEIGHT) * panels * numbers)


def _int8_panels(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
    units, multiplications = _panels(extents, constants)
    return Work(units, multiplications // 2)


def _key_heads(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
    rows, columns = extents[0]
    return Work(int(constants[0]), _OF_NUMBER * rows * columns)


def _heads_of_tokens(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
    units = extents[-1][0] * int(constants[1])
    return Work(units, _OF_HEAD * units)


def _heads_of_sequences(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
    tokens, columns = extents[0]
    sequences = extents[1][0] - 1
    return Work(sequences * int(constants[1]), tokens * tokens // max(1, sequences) * columns)


def _multiply(kind: Callable[[Attributes], int]) -> CallRule:
    return CallRule(
        "multiply", (0, 1, 3, -1), "ffff", _panels, lambda attributes, _: (kind(attributes),)
    )


def _multiply_int8(kind: Callable[[Attributes], int], *, bits: Literal[8, 4] = 8) -> CallRule:
    # after the tensors of its weight, `Int8Weight` has the largest code
    tensors = (0, 1, 2, 3, 4, -1)
    return CallRule(
        f"multiply_int{bits}",
        tensors,
        "fbfflf" if bits == 8 else "fufflf",
        # a byte has two codes of 4 bits
        _int8_panels if bits == 8 else _panels,
        lambda attributes, shapes: (*shapes[5], kind(attributes)),
    )


def _norm(*tensors: int | None, is_rms: bool = False) -> CallRule:
    return CallRule(
        "norm",
        tensors,
        "ffffff",
        _rows,
        lambda attributes, _: (float(attributes["eps"]), int(is_rms)),
    )


def _gather(*tensors: int | None) -> CallRule:
    return CallRule(
        "gather",
        tensors,
        "ifififf",
        _rows,
        lambda attributes, _: (float(attributes.get("scale", 1.0)),),
    )


def _kind(attributes: Attributes) -> int:
    return ACTIVATIONS[attributes["kind"]]


def _no_kind(_: Attributes) -> int:
    return NO_ACTIVATION


_ACTIVATE = CallRule("activate", (0, -1), "ff", _rows, lambda attributes, _: (_kind(attributes),))
_APPEND = CallRule(
    "append",
    (0, 1, 2, 3),
    "flff",
    _key_heads,
    lambda attributes, shapes: (attributes["num_kv_heads"], *shapes[2][2:]),
)
_ATTEND_BLOCKS = CallRule(
    "attend_blocks",
    (0, 1, 2, 4, 5, 6, 7, -1),
    "fffiiiff",
    _heads_of_tokens,
    lambda attributes, shapes: (
        attributes["num_heads"],
        attributes["num_kv_heads"],
        *shapes[1][2:],
        float(attributes["scale"]),
        attributes["window"],
    ),
)
_ATTEND = CallRule(
    "attend",
    (0, 1, 2, -1),
    "fiff",
    _heads_of_sequences,
    lambda attributes, _: (
        attributes["num_heads"],
        attributes["num_kv_heads"],
        float(attributes["scale"]),
        int(attributes["causal"]),
        attributes["window"],
    ),
)


def _heads(attributes: Attributes, shapes: Shapes) -> Sequence[float]:
    rotated = attributes["num_heads"] + attributes["num_kv_heads"]
    return rotated, shapes[0][1] // (rotated + attributes["num_kv_heads"])


# By the name of an op: the functions that run it, one after another.
RULES: Mapping[str, tuple[CallRule, ...]] = {
    "linear_panels": (_multiply(_no_kind),),
    "linear_panels_activate": (_multiply(_kind),),
    "linear_int8_panels": (_multiply_int8(_no_kind),),
    "linear_int8_panels_activate": (_multiply_int8(_kind),),
    "linear_int4_panels": (_multiply_int8(_no_kind, bits=4),),
    "linear_int4_panels_activate": (_multiply_int8(_kind, bits=4),),
    "layer_norm": (_norm(0, None, 1, 2, -1, -1),),
    "add_layer_norm": (_norm(0, 1, 2, 3, -1, -1),),
    "residual_layer_norm": (_norm(0, 1, 2, 3, -2, -1),),
    "rms_norm": (_norm(0, None, 1, None, -1, -1, is_rms=True),),
    "residual_rms_norm": (_norm(0, 1, 2, None, -2, -1, is_rms=True),),
    "activate": (_ACTIVATE,),
    "activate_gate": (_ACTIVATE,),
    "embed": (_gather(0, 1, 2, 3, None, None, -1),),
    "embed_layer_norm": (_gather(0, 3, 1, 4, 2, 5, -1), _norm(-1, None, 6, 7, -1, -1)),
    "select_rows": (_gather(1, 0, None, None, None, None, -1),),
    "rotary": (CallRule("rotate", (0, 1, 2, -1), "fiff", _rows, _heads),),
    "append_kv": (_APPEND,),
    "attention_paged": (_ATTEND_BLOCKS,),
    "attention_varlen": (_ATTEND,),
}
