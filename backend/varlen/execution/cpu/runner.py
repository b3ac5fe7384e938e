"""Runs batches on a CPU."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from varlen.execution.cpu.all_cores import AllCores, LoneCores
from varlen.execution.cpu.compiled_program import compile_program
from varlen.execution.cpu.linear_paths import compile_products, compiles_products
from varlen.execution.cpu.token_counts import batch_sizes, padded
from varlen.execution.executor import CoreShare
from varlen.execution.handoffs import Handoffs
from varlen.execution.packing import dims_of, packed_batch, split_answers
from varlen.memory.arena import Arena
from varlen.memory.usage import Dims
from varlen.program.program import NO_STATES, Program
from varlen.request.request import Float32Array, Prompt, RequestOptions

# oneDNN caches compiled primitives by shape, for GELU (32 KiB each) and products (up to 1.7 MiB each), 1,024 by
# default. An encoder has products of four shapes, for the numbers of tokens in `batch_sizes`.
_KEPT_PRIMITIVES = 192
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

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        states: Mapping[str, Tensor] = NO_STATES,
        handoffs: Handoffs | None = None,
    ) -> None:
        self._program = program
        self._states = states
        self._handoffs = handoffs
        self._kernels = kernels
        self._arena = arena
        self._is_padded = compiles_products(program)
        self._compiled = compile_program(program, kernels, states, needs_products=True)
        self._lone: LoneCores | None = None
        self._call: AllCores | None = None
        limit_primitives()

    def share_cores(self, share: CoreShare, cores: int) -> None:
        """Use this number of cores while `share` says that a batch runs alone, else one."""
        self._lone = LoneCores(share, cores)
        if self._compiled is None:
            self._call = AllCores(self._program, self._lone)

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
        received = {} if self._handoffs is None else self._handoffs.received(0, dims)
        inputs = [value for value in self._program.inputs if value.name not in received]
        batch = packed_batch(inputs, dims, packed, in_order)
        batch = replace(batch, inputs={**batch.inputs, **received})
        region = self._arena.allocate(dims)
        sent = {} if self._handoffs is None else self._handoffs.sent(0, dims)
        out = [sent[value.name] for value in self._program.outputs] if sent else None
        if self._compiled is not None:
            outputs = self._compiled.run(batch, self._kernels, region, out=out, lone=self._lone)
        else:
            outputs = self._program.run(
                batch, self._kernels, region, states=self._states, out=out, call=self._call
            )
        if self._handoffs is not None and sent:
            self._handoffs.pass_on(0, received, sent)
            return []
        (output,) = outputs
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
