"""The inputs of a batch: sequences packed one after the other into one buffer, which one copy moves to the device.

Which inputs there are, and their shapes, is what the program declares.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from varlen.memory.usage import Dims
from varlen.program.program import Value
from varlen.request import Float32Array, Int32Array, Prompt, RequestOptions

# Alignment of each input, in bytes: kernels load 16 bytes at a time.
_ALIGNMENT = 16

_Array: TypeAlias = npt.NDArray[Any]


def dims_of(lengths: Sequence[int]) -> Dims:
    """Return the dimensions of a batch of sequences of these lengths."""
    return {"tokens": sum(lengths), "sequences": len(lengths)}


def largest_dims(tokens: int) -> Dims:
    """Return the upper bound of each dimension of a batch of `tokens` tokens: no sequence is empty."""
    return {"tokens": tokens, "sequences": tokens}


def input_bytes(inputs: Sequence[Value], dims: Dims) -> int:
    """Return the size of a buffer that holds the inputs of such a batch."""
    return sum(_aligned(size) for _, _, size in _layout(inputs, dims))


def input_views(buffer: Tensor, inputs: Sequence[Value], dims: Dims) -> dict[str, Tensor]:
    """Return the inputs of a batch by name, as views of a buffer on any device.

    Args:
        buffer: `[bytes]` uint8, at least `input_bytes(inputs, dims)` long.
        inputs: as the program declares them.
        dims: of the batch.
    """
    views, begin = {}, 0
    for value, shape, size in _layout(inputs, dims):
        views[value.name] = buffer[begin : begin + size].view(value.dtype).view(shape)
        begin += _aligned(size)
    return views


def fill_inputs(
    views: Mapping[str, Tensor], prompts: Sequence[Prompt], options: Sequence[RequestOptions]
) -> None:
    """Write a batch into its inputs; unused room becomes tokens of no sequence, and sequences of no token.

    Args:
        views: of `input_views` on the CPU, for at least this many tokens and sequences.
        prompts: in the order in which they are packed.
        options: by prompt.
    """
    lengths = [prompt.num_tokens for prompt in prompts]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    packed = _Packed(prompts, options, lengths, bounds)
    for name, view in views.items():
        _FILL[name](packed, view.numpy())


def split_answers(
    output: Float32Array, lengths: Sequence[int], *, per_token: bool
) -> list[Float32Array]:
    """Return the answer of each sequence, a view of the batch's output.

    Args:
        output: `[tokens, ...]` if `per_token`, else `[sequences, ...]`.
        lengths: of the sequences, in tokens.
        per_token: whether each token has an answer of its own.
    """
    if not per_token:
        return list(output)
    bounds = np.cumsum([0, *lengths]).tolist()
    return [output[begin:end] for begin, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class _Packed:
    """What inputs are filled from.

    Attributes:
        prompts, options: in the order of packing.
        lengths: of the prompts, in tokens.
        bounds: `[prompts + 1]`, the first token of each, and the number of tokens.
    """

    prompts: Sequence[Prompt]
    options: Sequence[RequestOptions]
    lengths: Sequence[int]
    bounds: Int32Array

    def token_ids(self, into: _Array) -> None:
        tokens = self.bounds[-1]
        np.concatenate([prompt.token_ids for prompt in self.prompts], out=into[:tokens])
        into[tokens:] = 0

    def position_ids(self, into: _Array) -> None:
        tokens = self.bounds[-1]
        starts = np.repeat(self.bounds[:-1], self.lengths)
        np.subtract(np.arange(tokens, dtype=np.int32), starts, out=into[:tokens])
        into[tokens:] = 0

    def type_ids(self, into: _Array) -> None:
        into[:] = 0
        for begin, prompt in zip(self.bounds.tolist(), self.prompts, strict=False):
            if prompt.type_ids is not None:
                into[begin : begin + prompt.num_tokens] = prompt.type_ids

    def cu_seqlens(self, into: _Array) -> None:
        into[: len(self.bounds)] = self.bounds
        into[len(self.bounds) :] = self.bounds[-1]

    def normalize(self, into: _Array) -> None:
        count = len(self.options)
        into[:count] = [each.normalize for each in self.options]
        into[count:] = False


# What fills each input that a program may declare; see `models.inputs`.
_FILL = {
    "token_ids": _Packed.token_ids,
    "position_ids": _Packed.position_ids,
    "type_ids": _Packed.type_ids,
    "cu_seqlens": _Packed.cu_seqlens,
    "normalize": _Packed.normalize,
}


def _layout(inputs: Sequence[Value], dims: Dims) -> Iterator[tuple[Value, tuple[int, ...], int]]:
    """Yield each input with its shape and its size in bytes, in their order in the buffer."""
    for value in inputs:
        shape = value.at(dims)
        yield value, shape, prod(shape) * value.dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
