"""Puts ops for few rows into a recorded step: five kernels a layer.

They take the place of others. A norm is folded into the linear layer that reads it. A linear layer takes the append of
keys and values, the activation or the sum with the residual that follows.
docs/decisions/0118-few-rows.md has the reasons.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from varlen.program.program import Attribute, Op, Operand, Program, State, Value
from varlen_kernels.reference.few_rows import FoldedNorm
from varlen_kernels.reference.linear_layers import CodedWeight, LinearWeight

_RESIDUAL_NORMS = ("residual_layer_norm", "residual_rms_norm")
_NORMS = ("layer_norm", "rms_norm", *_RESIDUAL_NORMS)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Features whose sums are taken at once, for which weights are copied in fp32.
_FEATURES = 4096


class _Norm(NamedTuple):
    """A recorded norm: its input and its parameters."""

    x: Value
    weight: Tensor
    bias: Tensor | None
    eps: Attribute
    is_rms: bool


def fuse_steps(program: Program) -> Program | None:
    """Return the program for at most MOST_ROWS tokens; None if no op can be replaced.

    If the result of the output layer is its only output, it has a second one: the token of each row's largest logit.
    """
    fusion = _Fusion(program)
    fusion.replace()
    ops = [each for each in fusion.ops if each is not None]
    if len(ops) == len(program.ops):
        return None
    return Program(ops, [*program.outputs, *fusion.tokens])


class _Fusion:
    """The ops of a program, where replaced ones are None.

    Attributes:
        tokens: the value of the tokens, if it is computed.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.ops: list[Op | None] = list(program.ops)
        self.tokens: list[Value] = []
        self._maker = {value: i for i, op in enumerate(program.ops) for value in op.results}
        self._readers: dict[Value, list[int]] = {}
        for number, op in enumerate(program.ops):
            for value in dict.fromkeys(op.reads):
                self._readers.setdefault(value, []).append(number)

    def replace(self) -> None:
        """Replace each norm whose reader it can be folded into, and the ops around it."""
        for number, op in enumerate(self._program.ops):
            if op.kernel in _NORMS:
                self._replace_norm(number, op)

    def _replace_norm(self, number: int, op: Op) -> None:
        has_residual = op.kernel in _RESIDUAL_NORMS
        x = op.results[0] if has_residual else op.operands[0]
        weight, *bias = op.operands[1 + has_residual :]
        assert isinstance(x, Value)
        assert isinstance(weight, Tensor)
        is_rms = op.kernel.endswith("rms_norm")
        norm = _Norm(x, weight, None if is_rms else _tensor(bias[0]), op.attributes["eps"], is_rms)
        summed = self._sum(op) if has_residual else None
        if x.dtype != weight.dtype or (has_residual and summed is None):
            return
        if not self._fold(norm, op.results[-1]):
            return
        self.ops[number] = None
        if summed is not None:
            linear, self.ops[number] = summed
            self.ops[linear] = None

    def _sum(self, op: Op) -> tuple[int, Op] | None:
        """Return the linear layer before a norm with a residual, and their op.

        The layer is a number; None for another maker of what the norm reads.
        """
        x, residual = op.operands[:2]
        assert isinstance(x, Value)
        linear = self._maker.get(x)
        if linear is None or self._only_reader(x) is None:
            return None
        made_by = self._program.ops[linear]
        if made_by.kernel != "linear" or not _fits(made_by):
            return None
        return linear, Op(
            "linear_residual", (*made_by.operands, residual), {}, op.results[:1], in_place=(3,)
        )

    def _fold(self, norm: _Norm, normed: Value) -> bool:
        """Fold a norm into its reader; return whether it could be."""
        number = self._only_reader(normed)
        if number is None:
            return False
        reader = self._program.ops[number]
        if reader.kernel == "select_rows" and reader.operands[0] == normed:
            return self._fold_output(norm, number, reader)
        if reader.kernel not in ("linear", "linear_activate") or not _fits(reader):
            return False
        if reader.operands[0] != normed or reader.results[0] in self._program.outputs:
            return False
        attributes: dict[str, Attribute] = {"eps": norm.eps}
        operands = _folded(reader, norm)
        (product,) = reader.results
        if reader.kernel == "linear_activate":
            attributes |= reader.attributes
        else:
            last = self._readers[product][0]
            after = self._program.ops[last]
            if after.kernel == "append_kv" and _can_append(after, product):
                self.ops[number] = None
                # without positions, attention reads the result of the linear layer
                self.ops[last] = Op(
                    "norm_append_kv",
                    (*operands, *after.operands[1:6]),
                    {**after.attributes, **attributes},
                    after.results or reader.results,
                    after.writes,
                )
                return True
            if after.kernel in ("activate", "activate_gate") and self._only_reader(product) == last:
                is_gated = after.kernel == "activate_gate"
                if is_gated or after.operands[1] is None:
                    attributes |= {**after.attributes, "is_gated": is_gated}
                    self.ops[number], number, reader = None, last, after
        self.ops[number] = Op("norm_linear", operands, attributes, reader.results)
        return True

    def _fold_output(self, norm: _Norm, number: int, select: Op) -> bool:
        """Fold the last norm into the output layer, behind the op that selects its rows."""
        rows = select.operands[1]
        linear = self._only_reader(select.results[0])
        if linear is None:
            return False
        output = self._program.ops[linear]
        last, logits = linear, output.results[0]
        if output.kernel != "linear" or not _fits(output):
            return False
        if (widened := self._only_reader(logits)) is not None:
            last, (logits, *_) = widened, self._program.ops[widened].results
            if self._program.ops[last].kernel != "to_fp32":
                return False
        if self._program.outputs != (logits,) or logits.dtype != torch.float32:
            return False
        x, *weights = _folded(output, norm)
        tokens = Value(f"{logits.name}.tokens", logits.shape[:1], torch.int32)
        operands = (x, rows, *weights)
        self.ops[number] = self.ops[linear] = None
        self.ops[last] = Op("norm_next_tokens", operands, {"eps": norm.eps}, (logits, tokens))
        self.tokens = [tokens]
        return True

    def _only_reader(self, value: Value) -> int | None:
        """Return the number of the only op that reads a value.

        None if there are others, or if the value is an output.
        """
        readers = self._readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self._program.outputs else None


def _tensor(operand: Operand) -> Tensor | None:
    assert operand is None or isinstance(operand, Tensor)
    return operand


def _fits(op: Op) -> bool:
    """Return whether kernels for few rows read this layer's weight.

    It is codes, or `[out, in]` in memory.
    """
    x, weight = op.operands[:2]
    assert isinstance(x, Value)
    return isinstance(weight, CodedWeight) or (
        isinstance(weight, Tensor)
        and weight.dtype == x.dtype
        and x.dtype in _DTYPES
        and weight.t().is_contiguous()
    )


def _can_append(op: Op, qkv: Value) -> bool:
    """Return whether an append can follow in the kernel of the product."""
    (_, _, keys, _, _, cos_sin, query_weight, _), heads = op.operands, op.attributes
    assert isinstance(keys, State)
    head_dim = keys.shape[3]
    whole = cos_sin is None or (isinstance(cos_sin, Tensor) and cos_sin.shape[1] == head_dim)
    is_own = op.operands[0] == qkv and query_weight is None and bool(heads["num_heads"])
    return is_own and whole and head_dim % 2 == 0


def _folded(op: Op, norm: _Norm) -> tuple[Operand, ...]:
    _, weight, bias = op.operands
    assert isinstance(weight, Tensor | CodedWeight)
    bias, sums = _tensor(bias), None
    shift = bias
    if not norm.is_rms:
        sums = _through(weight, norm.weight)
        if norm.bias is not None:
            shift = _through(weight, norm.bias)
            shift = shift if bias is None else shift.add_(bias)
    return norm.x, weight, bias, FoldedNorm(norm.weight, norm.bias, sums, shift)


def _through(weight: LinearWeight, vector: Tensor) -> Tensor:
    """Return vector @ weight, `[out]` fp32."""
    matrix, scale = (weight, None) if isinstance(weight, Tensor) else weight
    parts = torch.split(matrix.t(), _FEATURES)
    found = torch.cat([part.float() @ vector.float() for part in parts])
    return found if scale is None else found.mul_(scale)
