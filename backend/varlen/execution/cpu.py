"""Runs batches on a CPU: split over one-core worker threads, or on all cores."""

import os
from collections.abc import Callable, Sequence

import torch

from varlen.execution.packing import (
    dims_of,
    fill_inputs,
    input_bytes,
    input_views,
    split_answers,
)
from varlen.execution.split import split_batch
from varlen.execution.workers import WorkerThreads
from varlen.memory.arena import Arena, Region
from varlen.memory.usage import Dims
from varlen.program.program import PackedBatch, Program
from varlen.request import Float32Array, Prompt, RequestOptions

# oneDNN caches compiled primitives by shape, for GELU (32 KiB each) and bf16 products (556 KiB each), 1,024 by default.
# Shapes of random lengths hardly repeat, so a small cache serves as well; a core needs five at a time.
_KEPT_PRIMITIVES_PER_CORE = 16
_LEAST_KEPT_PRIMITIVES = 64


class CpuRunner:
    """Runs a program on the cores that torch may use."""

    def __init__(self, program: Program, kernels: object, arena: Arena, hidden_size: int) -> None:
        self._program = program
        self._kernels = kernels
        self._arena = arena
        self._hidden_size = hidden_size
        self._cores = torch.get_num_threads()
        kept = max(_LEAST_KEPT_PRIMITIVES, _KEPT_PRIMITIVES_PER_CORE * self._cores)
        # read when torch first asks oneDNN for anything
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(kept))
        self._workers = WorkerThreads(self._cores if self._cores > 1 else 0)

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`."""
        lengths = [prompt.num_tokens for prompt in prompts]
        sub_batches = split_batch(lengths, self._cores, self._hidden_size)
        regions = self._arena.allocate([_dims(part, lengths) for part in sub_batches])
        if regions is None:
            # they do not fit side by side: all cores run the batch as a whole
            sub_batches = split_batch(lengths, 1, self._hidden_size)
            regions = [self._arena.allocate_whole(_dims(sub_batches[0], lengths))]

        def task(part: list[int], region: Region) -> Callable[[], list[Float32Array]]:
            chosen = [prompts[i] for i in part], [options[i] for i in part]
            return lambda: self._run_sub_batch(*chosen, region)

        tasks = list(map(task, sub_batches, regions))
        parts = [tasks[0]()] if len(tasks) == 1 else self._workers.run(tasks)
        answers = {
            index: row
            for part, rows in zip(sub_batches, parts, strict=True)
            for index, row in zip(part, rows, strict=True)
        }
        return [answers[index] for index in range(len(prompts))]

    def close(self) -> None:
        """Stop the threads."""
        self._workers.close()

    @torch.inference_mode()
    def _run_sub_batch(
        self,
        prompts: Sequence[Prompt],
        options: Sequence[RequestOptions],
        region: Region,
    ) -> list[Float32Array]:
        lengths = [prompt.num_tokens for prompt in prompts]
        declared, dims = self._program.inputs, dims_of(lengths)
        buffer = torch.empty(input_bytes(declared, dims), dtype=torch.uint8)
        inputs = input_views(buffer, declared, dims)
        fill_inputs(inputs, prompts, options)
        (output,) = self._program.run(PackedBatch(inputs, dims), self._kernels, region)
        return split_answers(output.numpy(), lengths, per_token=self._program.is_per_token)


def _dims(part: list[int], lengths: list[int]) -> Dims:
    return dims_of([lengths[i] for i in part])
