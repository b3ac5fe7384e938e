"""How an op of a program runs as functions of `entries`.

A rule names what a function gets, and how its work is split.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from varlen_kernels.cpu.bodies.epilogues import ACTIVATIONS, NO_ACTIVATION
from varlen_kernels.cpu.bodies.panel_layout import BLOCK
from varlen_kernels.cpu.native.table import DTYPES

# Rows and columns of a tensor: axes after the first count as one.
Extent: TypeAlias = tuple[int, int]
Attributes: TypeAlias = Mapping[str, Any]
Shapes: TypeAlias = Sequence[tuple[Any, ...]]

# The dtype of a model, the same for all of its tensors in a call: a function for each has a name of its own.
_OF_MODEL = "d"
_SUFFIXES: Mapping[torch.dtype, str] = {torch.float32: "", torch.bfloat16: "_bf16"}

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
        dtypes: their dtypes, a letter of `DTYPES` each, or `_OF_MODEL`.
        work: the work, given the extents of these tensors and the constants.
        constants: numbers that it gets after the tensors, given the op's attributes and the shapes of operands and
            results, in which a number stands by itself.
    """

    entry: str
    tensors: tuple[int | None, ...]
    dtypes: str
    work: Callable[[Sequence[Extent], Sequence[float]], Work]
    constants: Callable[[Attributes, Shapes], Sequence[float]]

    def of_operands(self, operands: Sequence[Any]) -> list[Any]:
        """Return what the function gets of flat operands and results."""
        return [None if place is None else operands[place] for place in self.tensors]

    def as_read(self, place: int, constant: Tensor) -> Tensor:
        """Return a constant in the dtype in which the function reads it.

        Args:
            place: the place of the constant among the tensors.
            constant: a tensor of the program.
        """
        is_fp32 = self.dtypes[place] == "f"
        return constant.float() if is_fp32 and constant.is_floating_point() else constant

    def entry_for(self, dtypes: Sequence[torch.dtype | None]) -> str | None:
        """Return the name of the function for these dtypes; None if there is none.

        Args:
            dtypes: dtype of each tensor, None for one that is left out.
        """
        pairs = list(zip(self.dtypes, dtypes, strict=True))
        of_model = {dtype for letter, dtype in pairs if letter == _OF_MODEL and dtype is not None}
        others = [
            dtype is None or dtype == DTYPES[letter]
            for letter, dtype in pairs
            if letter != _OF_MODEL
        ]
        if len(of_model) > 1 or not all(others):
            return None
        suffix = _SUFFIXES.get(next(iter(of_model), torch.float32))
        return None if suffix is None else self.entry + suffix


def rules_of(kernel: str, operands: Sequence[Any]) -> tuple[CallRule, ...]:
    """Return the functions that run an op, one after another; none if it has none.

    Args:
        kernel: name of the op.
        operands: its operands, an element of a tuple is none of its own.
    """
    has_distances = kernel == "attention_varlen" and operands[4] is not None
    return RULES.get(f"{kernel} with distances" if has_distances else kernel, ())


def flat(operands: Sequence[Any]) -> Iterator[Any]:
    """Yield operands, each element of a tuple by itself."""
    for operand in operands:
        if isinstance(operand, tuple):
            yield from operand
        else:
            yield operand


def shape_of(operand: Any) -> tuple[Any, ...]:
    """Return the shape of an operand; a number by itself, nothing for none."""
    if operand is None:
        return ()
    return (operand,) if isinstance(operand, int) else operand.shape


def _rows(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    rows, columns = extents[-1]
    return Work(rows, _OF_NUMBER * rows * columns)


def _panels(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    (rows, _hidden), (panels, numbers) = extents[:2]
    return Work(-(-rows // BLOCK) * panels, (rows + _OF_WEIGHT) * panels * numbers)


def _int8_panels(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
    units, multiplications = _panels(extents, constants)
    return Work(units, multiplications // 2)


def _tokens(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    rows, columns = extents[0]
    return Work(rows, _OF_NUMBER * rows * columns)


def _heads_of_contexts(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
    (tokens, _), (sequences, _), num_kv_heads = extents[0], extents[4], int(constants[1])
    return Work(sequences * num_kv_heads, _OF_HEAD * tokens * num_kv_heads)


def _heads_of_sequences(extents: Sequence[Extent], constants: Sequence[float]) -> Work:
    tokens, columns = extents[0]
    sequences = extents[1][0] - 1
    return Work(sequences * int(constants[1]), tokens * tokens // max(1, sequences) * columns)


def _multiply(kind: Callable[[Attributes], int]) -> CallRule:
    return CallRule(
        "multiply", (0, 1, 3, -1), "dddd", _panels, lambda attributes, _: (kind(attributes),)
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
        "dddddd",
        _rows,
        lambda attributes, _: (float(attributes["eps"]), int(is_rms)),
    )


def _gather(*tensors: int | None) -> CallRule:
    return CallRule(
        "gather",
        tensors,
        "idididd",
        _rows,
        lambda attributes, _: (float(attributes.get("scale", 1.0)),),
    )


def _kind(attributes: Attributes) -> int:
    return ACTIVATIONS[attributes["kind"]]


def _no_kind(_: Attributes) -> int:
    return NO_ACTIVATION


def _activate(bias: int | None) -> CallRule:
    tensors = (0, bias, -1)
    return CallRule("activate", tensors, "ddd", _rows, lambda attributes, _: (_kind(attributes),))


# Without positions there is neither a weight of keys nor a result: the last tensor is None, too.
_APPEND = CallRule(
    "append",
    (0, 1, 2, 3, 4, 5, 6, 7, -1),
    "dlddifddd",
    _tokens,
    lambda attributes, shapes: (
        attributes["num_heads"],
        attributes["num_kv_heads"],
        *shapes[2][2:],
        float(attributes["eps"]),
    ),
)


def _attend_blocks(entry: str) -> CallRule:
    return CallRule(
        entry,
        (0, 1, 2, 3, 4, 5, 6, 7, -1),
        "dddiiiifd",
        _heads_of_contexts,
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
    (0, 1, 2, 5, -1),
    "difid",
    _heads_of_sequences,
    lambda attributes, _: (
        attributes["num_heads"],
        attributes["num_kv_heads"],
        float(attributes["scale"]),
        int(attributes["causal"]),
        attributes["window"],
    ),
)


_ATTEND_DISTANCES = CallRule(
    "attend_distances",
    (0, 1, 2, 4, 5, 6, 7, -1),
    "difiddid",
    lambda extents, constants: _heads_of_sequences(extents, (0, *constants)),
    lambda attributes, _: (
        attributes["num_heads"],
        float(attributes["scale"]),
        int(attributes["causal"]),
        attributes["window"],
    ),
)


def _one_unit(extents: Sequence[Extent], _: Sequence[float]) -> Work:
    rows, columns = extents[0]
    # one thread meets the other ranks
    return Work(1, rows * columns)


def _meet(entry: str) -> CallRule:
    return CallRule(
        entry,
        (0, 1, -1),
        "dld",
        _one_unit,
        lambda attributes, _: (attributes["rank"], attributes["size"]),
    )


def _heads(attributes: Attributes, shapes: Shapes) -> Sequence[float]:
    rotated = attributes["num_heads"] + attributes["num_kv_heads"]
    return rotated, shapes[0][1] // (rotated + attributes["num_kv_heads"])


# By the name of an op: the functions that run it; see `rules_of`.
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
    "activate": (_activate(1),),
    "activate_gate": (_activate(None),),
    "embed": (_gather(0, 1, 2, 3, None, None, -1),),
    "embed_layer_norm": (_gather(0, 3, 1, 4, 2, 5, -1), _norm(-1, None, 6, 7, -1, -1)),
    "select_rows": (_gather(1, 0, None, None, None, None, -1),),
    "rotary": (CallRule("rotate", (0, 1, 2, None, -1), "difdd", _rows, _heads),),
    "append_kv": (_APPEND,),
    "all_reduce": (_meet("all_reduce"),),
    "gather_columns": (_meet("gather_columns"),),
    "local_ids": (
        CallRule(
            "local_ids",
            (0, -1),
            "ii",
            _rows,
            lambda attributes, _: (attributes["first"], attributes["count"]),
        ),
    ),
    "attention_paged": (_attend_blocks("attend_tokens"), _attend_blocks("attend_chunks")),
    "attention_varlen": (_ATTEND,),
    "attention_varlen with distances": (_ATTEND_DISTANCES,),
}
