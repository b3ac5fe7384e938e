"""Runs batches on a CPU."""

import os
from collections.abc import Sequence

import numpy as np
import torch

from varlen.execution.cpu.linear_paths import compile_products, compiles_products
from varlen.execution.packing import dims_of, packed_batch, split_answers
from varlen.memory.arena import Arena
from varlen.memory.usage import Dims
from varlen.program.program import Program
from varlen.request.request import Float32Array, Prompt, RequestOptions

# oneDNN caches compiled primitives by shape, for GELU (32 KiB each) and products (up to 1.7 MiB each), 1,024 by
# default. An encoder has products of four shapes, for the numbers of tokens in `batch_sizes`.
_KEPT_PRIMITIVES = 192
# Numbers of tokens from one power of two to the next that products are compiled for, and the smallest difference.
_STEPS, _LEAST_STEP = 8, 8
# Products of batches up to this size are compiled before workers start, which share them.
_USUAL_TOKENS = 512


def limit_primitives() -> None:
    """Limit the memory of compiled primitives.

    oneDNN reads the limit once, when torch first uses it.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_PRIMITIVES))


class CpuRunner:
    """Runs a program on the cores that torch gives the thread.

    oneDNN compiles a product for each number of rows, which takes longer than a small product itself. So batches are
    padded to few numbers of tokens: by less than an eighth, or by seven tokens.
    """

    def __init__(self, program: Program, kernels: object, arena: Arena) -> None:
        self._program = program
        self._kernels = kernels
        self._arena = arena
        self._is_padded = compiles_products(program)
        limit_primitives()

    def compile(self) -> None:
        """Compile what batches of usual sizes need."""
        if self._is_padded:
            compile_products(self._program, self._kernels, batch_sizes(_USUAL_TOKENS))

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`."""
        # the shortest first: neighbours of one length share an attention call
        order = sorted(range(len(prompts)), key=lambda i: prompts[i].num_tokens)
        packed = [prompts[i] for i in order]
        dims, in_order = self._dims(packed), [options[i] for i in order]
        batch = packed_batch(self._program.inputs, dims, packed, in_order)
        (output,) = self._program.run(batch, self._kernels, self._arena.allocate(dims))
        answers = split_answers(output.numpy(), packed, self._program.row_dimension)
        return [answers[place] for place in np.argsort(order).tolist()]

    def close(self) -> None:
        """No resources to release."""

    def _dims(self, prompts: Sequence[Prompt]) -> Dims:
        """Return the dimensions of a batch, with unused tokens where products are compiled."""
        lengths = [prompt.num_tokens for prompt in prompts]
        dims = dims_of(lengths, sum(prompt.num_masks for prompt in prompts))
        if not self._is_padded:
            return dims
        return {**dims, "tokens": min(padded(dims["tokens"]), self._arena.max_tokens)}


def padded(tokens: int) -> int:
    """Return the least of `batch_sizes` that has room for this number of tokens."""
    step = max(_LEAST_STEP, (1 << (tokens.bit_length() - 1)) // _STEPS)
    return -(-tokens // step) * step


def batch_sizes(most: int) -> list[int]:
    """Return the numbers of tokens that batches are padded to, ascending, up to `most`."""
    return sorted({padded(tokens) for tokens in range(1, most + 1)})
