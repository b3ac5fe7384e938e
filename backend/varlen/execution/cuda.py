"""Runs batches on a CUDA GPU by replaying graphs captured at load.

A small encoder's ops are shorter on the GPU than the Python that launches them. So nothing is
launched op by op in service: each batch is one copy of its inputs, one graph, one copy of its answers.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from varlen.execution.buckets import Bucket, Buckets
from varlen.execution.packing import (
    dims_of,
    fill_inputs,
    input_bytes,
    input_views,
    split_answers,
)
from varlen.memory.arena import Arena
from varlen.memory.usage import Dims
from varlen.program.program import PackedBatch, Program
from varlen.request import Float32Array, Prompt, RequestOptions

_log = logging.getLogger(__name__)

# Log lines about the progress of the captures.
_PROGRESS_LINES = 4

Replay = Callable[[], object]


class Graphs(Protocol):
    """Captures work on a device."""

    def stream(self) -> AbstractContextManager[object]:
        """Return the context in which everything on the device is done."""

    def capture(self, work: Callable[[], object]) -> Replay:
        """Return a function that does the same work again, on the same memory."""


class CudaGraphs:
    """CUDA graphs of one stream and one memory pool. One runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def stream(self) -> AbstractContextManager[object]:
        """Return the context that makes the stream, and its device, current."""
        return torch.cuda.stream(self._stream)

    def capture(self, work: Callable[[], object]) -> Replay:
        """Return a function that does the same work again, on the same memory.

        The work runs once before the capture, which must not compile or load kernels.
        """
        # weights and buffers may still be on their way
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.stream():
            work()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # other threads of the process may use the device meanwhile
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graph of one bucket, and the memory that it reads and writes.

    Attributes:
        inputs: the program's inputs on the host, by name.
        input_bytes: bytes of the input buffers that the graph reads.
        output: on the device.
        replay: runs it.
    """

    inputs: dict[str, Tensor]
    input_bytes: int
    output: Tensor
    replay: Replay


class CudaRunner:
    """Runs a program on a GPU, for every batch that its arena holds."""

    def __init__(
        self, program: Program, kernels: object, arena: Arena, graphs: Graphs | None = None
    ) -> None:
        device, largest = arena.device, arena.largest
        self._program = program
        self._kernels = kernels
        self._arena = arena
        self._graphs = graphs or CudaGraphs(device)
        self._buckets = Buckets(arena.max_tokens)
        size = input_bytes(program.inputs, largest)
        pinned = device.type == "cuda"
        self._host_inputs = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._device_inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        (self._output,) = program.new_outputs(largest, device)
        self._captured = dict(self._capture_all())

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`.

        Raises:
            ValueError: the batch has more tokens than graphs were captured for.
        """
        # the longest first, so that the last programs of attention to start are short ones
        order = sorted(range(len(prompts)), key=lambda i: -prompts[i].num_tokens)
        lengths = [prompts[i].num_tokens for i in order]
        bucket = self._buckets.smallest(sum(lengths), len(lengths))
        captured = self._captured[bucket]
        # the graph writes to this region: a plan depends only on the bucket
        self._arena.allocate(bucket.dims)
        chosen = [prompts[i] for i in order], [options[i] for i in order]
        output = self._replay(captured, *chosen).numpy()
        answers = split_answers(output, lengths, per_token=self._program.is_per_token)
        return [answers[place] for place in np.argsort(order).tolist()]

    def close(self) -> None:
        """Release the graphs."""
        self._captured.clear()

    @torch.inference_mode()
    def _replay(
        self, captured: _Captured, prompts: list[Prompt], options: list[RequestOptions]
    ) -> Tensor:
        """Return the output of a batch, on the host."""
        fill_inputs(captured.inputs, prompts, options)
        rows = self._output_rows(dims_of([prompt.num_tokens for prompt in prompts]))
        size = captured.input_bytes
        with self._graphs.stream():
            self._device_inputs[:size].copy_(self._host_inputs[:size], non_blocking=True)
            captured.replay()
            # waits for the device, so the next batch may overwrite the inputs
            return captured.output[:rows].to("cpu", copy=True)

    @torch.inference_mode()
    def _capture_all(self) -> Iterator[tuple[Bucket, _Captured]]:
        began, buckets = time.monotonic(), list(self._buckets)
        for done, bucket in enumerate(buckets, start=1):
            yield bucket, self._capture(bucket)
            if done % -(-len(buckets) // _PROGRESS_LINES) == 0 or done == len(buckets):
                seconds = time.monotonic() - began
                _log.info("captured %d of %d graphs in %.1f s", done, len(buckets), seconds)

    def _capture(self, bucket: Bucket) -> _Captured:
        declared, dims = self._program.inputs, bucket.dims
        # inputs of zeros are a batch whose tokens belong to no sequence
        batch = PackedBatch(input_views(self._device_inputs, declared, dims), dims)
        output = self._output[: self._output_rows(dims)]
        region = self._arena.allocate(dims)

        def forward() -> None:
            self._program.run(batch, self._kernels, region, out=[output])

        return _Captured(
            input_views(self._host_inputs, declared, dims),
            input_bytes(declared, dims),
            output,
            self._graphs.capture(forward),
        )

    def _output_rows(self, dims: Dims) -> int:
        return self._program.outputs[0].at(dims)[0]
