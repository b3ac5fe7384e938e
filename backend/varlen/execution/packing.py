"""The inputs of a batch: sequences laid one after the other into one buffer, so that one copy moves them all."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from varlen.request import Float32Array, Prompt, RequestOptions

# Of every input's first byte: kernels load 16 bytes at a time.
_ALIGNMENT = 16


def input_bytes(tokens: int, sequences: int) -> int:
    """Return the size of a buffer that holds the inputs of such a batch."""
    return sum(_aligned(count * dtype.itemsize) for _, count, dtype in _layout(tokens, sequences))


def input_views(buffer: Tensor, tokens: int, sequences: int) -> dict[str, Tensor]:
    """Return the inputs of a batch by name, as views of a buffer on any device.

    Args:
        buffer: `[bytes]` uint8, at least `input_bytes(tokens, sequences)` long.
    """
    views, begin = {}, 0
    for name, count, dtype in _layout(tokens, sequences):
        size = count * dtype.itemsize
        views[name] = buffer[begin : begin + size].view(dtype)
        begin += _aligned(size)
    return views


def fill_inputs(
    views: Mapping[str, Tensor], prompts: Sequence[Prompt], options: Sequence[RequestOptions]
) -> None:
    """Write a batch into its inputs; room that is left becomes tokens of no sequence, and sequences of no token.

    Args:
        views: of `input_views` on the CPU, for at least this many tokens and sequences.
        prompts: in the order in which they are packed.
        options: by prompt.
    """
    arrays = {name: view.numpy() for name, view in views.items()}
    lengths = [prompt.num_tokens for prompt in prompts]
    tokens, count = sum(lengths), len(lengths)
    for array in arrays.values():
        array[:] = 0
    bounds = arrays["cu_seqlens"]
    np.cumsum(lengths, out=bounds[1 : count + 1])
    bounds[count + 1 :] = tokens
    np.concatenate([prompt.token_ids for prompt in prompts], out=arrays["token_ids"][:tokens])
    starts = np.repeat(bounds[:count], lengths)
    np.subtract(np.arange(tokens, dtype=np.int32), starts, out=arrays["position_ids"][:tokens])
    for begin, prompt in zip(bounds.tolist(), prompts, strict=False):
        if prompt.type_ids is not None:
            arrays["type_ids"][begin : begin + prompt.num_tokens] = prompt.type_ids
    arrays["normalize"][:count] = [each.normalize for each in options]


def split_answers(
    output: Float32Array, lengths: Sequence[int], *, per_token: bool
) -> list[Float32Array]:
    """Return the answer of each sequence, a view of the batch's output.

    Args:
        output: `[tokens, ...]` if `per_token`, else `[sequences, ...]`.
    """
    if not per_token:
        return list(output)
    bounds = np.cumsum([0, *lengths]).tolist()
    return [output[begin:end] for begin, end in pairwise(bounds)]


def _layout(tokens: int, sequences: int) -> tuple[tuple[str, int, torch.dtype], ...]:
    """Return (name, elements, dtype) of each input, in their order in the buffer."""
    return (
        ("token_ids", tokens, torch.int32),
        ("position_ids", tokens, torch.int32),
        ("type_ids", tokens, torch.int32),
        ("cu_seqlens", sequences + 1, torch.int32),
        ("normalize", sequences, torch.bool),
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
