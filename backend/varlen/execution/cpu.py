"""Runs batches on a CPU."""

import os
from collections.abc import Sequence

import numpy as np
import torch

from varlen.execution.packing import (
    dims_of,
    fill_inputs,
    input_bytes,
    input_views,
    split_answers,
)
from varlen.memory.arena import Arena
from varlen.program.program import PackedBatch, Program
from varlen.request import Float32Array, Prompt, RequestOptions

# oneDNN caches compiled primitives by shape, for GELU (32 KiB each) and products (up to 1.7 MiB each), 1,024 by
# default. Shapes of random lengths hardly repeat, so a small cache serves as well.
_KEPT_PRIMITIVES = 64


def limit_primitives() -> None:
    """Limit the memory of compiled primitives.

    oneDNN reads the limit once, when torch first uses it.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_PRIMITIVES))


class CpuRunner:
    """Runs a program on the cores that torch gives the thread."""

    def __init__(self, program: Program, kernels: object, arena: Arena) -> None:
        self._program = program
        self._kernels = kernels
        self._arena = arena
        limit_primitives()

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`."""
        # the shortest first: neighbours of one length share an attention call
        order = sorted(range(len(prompts)), key=lambda i: prompts[i].num_tokens)
        lengths = [prompts[i].num_tokens for i in order]
        declared, dims = self._program.inputs, dims_of(lengths)
        buffer = torch.empty(input_bytes(declared, dims), dtype=torch.uint8)
        inputs = input_views(buffer, declared, dims)
        fill_inputs(inputs, [prompts[i] for i in order], [options[i] for i in order])
        region = self._arena.allocate_whole(dims)
        (output,) = self._program.run(PackedBatch(inputs, dims), self._kernels, region)
        answers = split_answers(output.numpy(), lengths, per_token=self._program.is_per_token)
        return [answers[place] for place in np.argsort(order).tolist()]

    def close(self) -> None:
        """Do nothing: there is nothing but memory."""
