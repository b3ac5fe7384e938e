"""Packs the inputs of a batch into one buffer, which one copy moves.

The program declares the inputs and their shapes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from varlen.memory.usage import Dims
from varlen.program.program import PackedBatch, Value
from varlen.request.request import (
    MAX_MASKS,
    Float32Array,
    Int32Array,
    Masks,
    Prompt,
    RequestOptions,
    Unpooled,
    Vectors,
)


def active_terms(weights: Float32Array) -> Float32Array:
    """Return the terms of a sequence whose weight is not 0, the largest weight first.

    Args:
        weights: `[vocabulary]`, of each term; none is negative.

    Returns:
        `[terms, 2]` fp32: the number of each term, which fp32 holds exactly up to 2**24, and its weight. Among
        equal weights, the lower number comes first.
    """
    # numpy finds what is true ten times as fast as what is not 0
    terms = np.flatnonzero(weights != 0)
    found = weights[terms]
    order = np.argsort(-found, kind="stable")
    rows: Float32Array = np.stack(
        (terms[order], found[order]), axis=1, dtype=np.float32, casting="unsafe"
    )
    return rows


# Alignment of each input, in bytes: kernels load 16 bytes at a time.
_ALIGNMENT = 16


def dims_of(lengths: Sequence[int], masks: int = 0) -> Dims:
    """Return the dimensions of a batch of sequences of these lengths."""
    return {"tokens": sum(lengths), "sequences": len(lengths), "masks": masks}


def largest_dims(tokens: int, max_sequences: int | None = None) -> Dims:
    """Return the largest dimensions of a batch of `tokens` tokens.

    Args:
        tokens: tokens of the batch.
        max_sequences: None if each token may be a sequence.
    """
    sequences = min(tokens, max_sequences or tokens)
    return {"tokens": tokens, "sequences": sequences, "masks": largest_masks(tokens, sequences)}


def largest_masks(tokens: int, sequences: int) -> int:
    """Return the most masks that a batch of this size may have."""
    return min(tokens, MAX_MASKS * sequences)


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where the inputs of a batch lie in one buffer.

    Attributes:
        num_bytes: size of the buffer.
        places: each input, its shape, and its bytes in the buffer.
    """

    num_bytes: int
    places: tuple[tuple[Value, tuple[int, ...], slice], ...]

    @classmethod
    def of(cls, inputs: Sequence[Value], dims: Dims) -> "InputLayout":
        """Return the layout of inputs, as a program declares them, of such a batch."""
        places, begin = [], 0
        for value in inputs:
            shape = value.at(dims)
            end = begin + prod(shape) * value.dtype.itemsize
            places.append((value, shape, slice(begin, end)))
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        return cls(begin, tuple(places))

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the inputs by name, as views of a buffer: `[bytes]` uint8, at least `num_bytes`."""
        return {
            value.name: buffer[part].view(value.dtype).view(shape)
            for value, shape, part in self.places
        }


def packed_batch(
    inputs: Sequence[Value],
    dims: Dims,
    prompts: Sequence[Prompt],
    options: Sequence[RequestOptions],
) -> PackedBatch:
    """Return a batch in memory of its own on the CPU; see `fill_inputs`."""
    layout = InputLayout.of(inputs, dims)
    views = layout.views(torch.empty(layout.num_bytes, dtype=torch.uint8))
    fill_inputs(views, prompts, options)
    return PackedBatch(views, dims)


def fill_inputs(
    views: Mapping[str, Tensor], prompts: Sequence[Prompt], options: Sequence[RequestOptions]
) -> None:
    """Write a batch into its inputs.

    Unused space becomes tokens of no sequence and sequences of no token.

    Args:
        views: views of an `InputLayout` on the CPU, for at least this many tokens and sequences.
        prompts: prompts in the order in which they are packed.
        options: one per prompt.

    Raises:
        ValueError: the program reads an input that prompts and options do not have.
    """
    lengths = [prompt.num_tokens for prompt in prompts]
    bounds = bounds_of(lengths)
    tokens, count = int(bounds[-1]), len(lengths)
    for name, view in views.items():
        into = view.numpy()
        into[:] = 0
        match name:
            case "token_ids":
                np.concatenate([prompt.token_ids for prompt in prompts], out=into[:tokens])
            case "position_ids":
                into[:tokens] = positions_of(bounds, lengths)
            case "type_ids":
                if any(prompt.type_ids is not None for prompt in prompts):
                    np.concatenate([_type_ids(prompt) for prompt in prompts], out=into[:tokens])
            case "cu_seqlens":
                into[: count + 1] = bounds
                into[count + 1 :] = tokens
            case "mask_rows":
                rows = _mask_rows(prompts, bounds)
                into[: len(rows)] = rows
            case "normalize":
                into[:count] = [each.normalize for each in options]
            case "normalize_tokens":
                into[:tokens] = np.repeat([each.normalize for each in options], lengths)
            case "key_lengths":
                into[:count] = [p.payload_count(Vectors) or p.num_tokens for p in prompts]
            case "unpooled_lengths":
                into[:count] = [prompt.payload_count(Unpooled) or 0 for prompt in prompts]
            case _:
                raise ValueError(f'the program reads an input "{name}", which prompts do not have')


def _type_ids(prompt: Prompt) -> Int32Array:
    return np.zeros_like(prompt.token_ids) if prompt.type_ids is None else prompt.type_ids


def _mask_rows(prompts: Sequence[Prompt], bounds: Int32Array) -> Int32Array:
    """Return the masks of all sequences by their place in the batch, `[masks]` int32."""
    rows = [
        begin + places
        for begin, prompt in zip(bounds, prompts, strict=False)
        if (places := prompt.payload_tokens(Masks)) is not None
    ]
    return np.concatenate([np.empty(0, np.int32), *rows])


def split_answers(output: Float32Array, prompts: Sequence[Prompt], rows: str) -> list[Float32Array]:
    """Return the answer of each sequence, a view of the batch's output.

    Args:
        output: `[rows, ...]`.
        prompts: the sequences.
        rows: things with a row each: tokens, masks or sequences.
    """
    if rows == "sequences":
        return list(output)
    counts = [prompt.num_masks if rows == "masks" else prompt.num_tokens for prompt in prompts]
    return [output[begin:end] for begin, end in pairwise(bounds_of(counts).tolist())]


def bounds_of(lengths: Sequence[int] | Int32Array) -> Int32Array:
    """Return cumulative starts, then the sum: `[lengths + 1]`."""
    return np.concatenate(([0], np.cumsum(lengths)), dtype=np.int32, casting="unsafe")


def positions_of(
    bounds: Int32Array, lengths: Sequence[int] | Int32Array, starts: Int32Array | int = 0
) -> Int32Array:
    """Return the position of each token, `[tokens]`; each row counts from its start."""
    positions = np.arange(bounds[-1], dtype=np.int32)
    positions -= np.repeat(bounds[:-1] - starts, lengths)
    return positions
