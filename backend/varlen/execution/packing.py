"""Packs the inputs of a batch into one buffer, which one copy moves.

The program declares the inputs and their shapes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np
from torch import Tensor

from varlen.memory.usage import Dims
from varlen.program.program import Value
from varlen.request.request import MAX_MASKS, Float32Array, Int32Array, Prompt, RequestOptions

# Alignment of each input, in bytes: kernels load 16 bytes at a time.
_ALIGNMENT = 16
# Inputs with a number of tokens of each sequence.
_LENGTHS: Mapping[str, Callable[[Prompt], int]] = {
    "key_lengths": lambda prompt: prompt.num_tokens if prompt.num_keys is None else prompt.num_keys,
    "unpooled_lengths": lambda prompt: prompt.num_unpooled,
}


def dims_of(lengths: Sequence[int], masks: int = 0) -> Dims:
    """Return the dimensions of a batch of sequences of these lengths."""
    return {"tokens": sum(lengths), "sequences": len(lengths), "masks": masks}


def largest_dims(tokens: int, max_sequences: int | None = None) -> Dims:
    """Return the largest dimensions of a batch of `tokens` tokens.

    Args:
        tokens: of the batch.
        max_sequences: None if each token may be a sequence.
    """
    sequences = min(tokens, max_sequences or tokens)
    return {"tokens": tokens, "sequences": sequences, "masks": largest_masks(tokens, sequences)}


def largest_masks(tokens: int, sequences: int) -> int:
    """Return the most masks that a batch of this size may have."""
    return min(tokens, MAX_MASKS * sequences)


def input_bytes(inputs: Sequence[Value], dims: Dims) -> int:
    """Return the size of a buffer that holds the inputs of such a batch."""
    return sum(_aligned(size) for _, _, size in _layout(inputs, dims))


def input_views(buffer: Tensor, inputs: Sequence[Value], dims: Dims) -> dict[str, Tensor]:
    """Return the inputs of a batch by name, as views of a buffer.

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
    """Write a batch into its inputs.

    Unused space becomes tokens of no sequence and sequences of no token.

    Args:
        views: of `input_views` on the CPU, for at least this many tokens and sequences.
        prompts: in the order in which they are packed.
        options: one per prompt.

    Raises:
        ValueError: the program reads an input that prompts and options do not have.
    """
    lengths = [prompt.num_tokens for prompt in prompts]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    tokens, count = int(bounds[-1]), len(lengths)
    for name, view in views.items():
        into = view.numpy()
        into[:] = 0
        match name:
            case "token_ids":
                np.concatenate([prompt.token_ids for prompt in prompts], out=into[:tokens])
            case "position_ids":
                starts = np.repeat(bounds[:-1], lengths)
                np.subtract(np.arange(tokens, dtype=np.int32), starts, out=into[:tokens])
            case "type_ids":
                for begin, prompt in zip(bounds.tolist(), prompts, strict=False):
                    if prompt.type_ids is not None:
                        into[begin : begin + prompt.num_tokens] = prompt.type_ids
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
            case "key_lengths" | "unpooled_lengths":
                into[:count] = [_LENGTHS[name](prompt) for prompt in prompts]
            case _:
                raise ValueError(f'the program reads an input "{name}", which prompts do not have')


def _mask_rows(prompts: Sequence[Prompt], bounds: Int32Array) -> Int32Array:
    """Return the masks of all sequences by their place in the batch, `[masks]` int32."""
    rows = [
        begin + prompt.mask_places
        for begin, prompt in zip(bounds, prompts, strict=False)
        if prompt.mask_places is not None
    ]
    return np.concatenate([np.empty(0, np.int32), *rows])


def split_answers(output: Float32Array, prompts: Sequence[Prompt], rows: str) -> list[Float32Array]:
    """Return the answer of each sequence, a view of the batch's output.

    Args:
        output: `[rows, ...]`.
        prompts: the sequences.
        rows: what has a row each: tokens, masks or sequences.
    """
    if rows == "sequences":
        return list(output)
    counts = [prompt.num_masks if rows == "masks" else prompt.num_tokens for prompt in prompts]
    bounds = np.cumsum([0, *counts]).tolist()
    return [output[begin:end] for begin, end in pairwise(bounds)]


def _layout(inputs: Sequence[Value], dims: Dims) -> Iterator[tuple[Value, tuple[int, ...], int]]:
    """Yield name, shape and bytes of each input, in the order of the buffer."""
    for value in inputs:
        shape = value.at(dims)
        yield value, shape, prod(shape) * value.dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
