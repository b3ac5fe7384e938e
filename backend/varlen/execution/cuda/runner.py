"""Runs batches on a CUDA GPU by replaying graphs captured at load.

A small encoder's ops are shorter on the GPU than the Python that launches them. So nothing is
launched op by op in service: each batch is one copy of its inputs, one graph, one copy of its answers.
Nothing waits either: while a batch runs, the next one is packed into other buffers and started.
docs/decisions/0029-gpu-executor.md has the reasons.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from varlen.execution.cuda.buckets import Bucket, Buckets
from varlen.execution.cuda.graphs import CudaGraphs, Graphs, Replay, capture_each, on_host
from varlen.execution.packing import InputLayout, dims_of, fill_inputs, split_answers
from varlen.memory.arena import Arena
from varlen.memory.usage import Dims
from varlen.program.program import PackedBatch, Program
from varlen.request.request import Float32Array, Prompt, RequestOptions

# Batches in flight: one runs, the next one is ready on the GPU's queue.
_SLOTS = 2
# Log lines about the progress of the captures.
_PROGRESS_LINES = 4
# The first replay of a graph takes longer.
_TIMED_REPLAYS = 3
# The system may end a sleep so much too late.
_OVERSLEEP_SECONDS = 1e-4

# Waits for the answers of a batch that was started; see `Runner.run`.
Answers: TypeAlias = Callable[[], list[Float32Array]]


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """Memory of the host for one batch in flight.

    Attributes:
        inputs: `[bytes]` uint8, read by the GPU until the batch has run.
        output: output on the device, written by the GPU.
    """

    inputs: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graph of one bucket, and the device memory that it reads and writes.

    Attributes:
        inputs: the program's inputs in each set of buffers, by name.
        input_bytes: bytes of the input buffers that the graph reads.
        replay: starts it.
        seconds: time of the graph without tokens; no batch takes less.
    """

    inputs: Mapping[_Buffers, dict[str, Tensor]]
    input_bytes: int
    replay: Replay
    seconds: float


class CudaRunner:
    """Runs a program on a GPU, for every batch that its arena holds.

    Any thread may call `launch` and the function that it returns.

    Attributes:
        slots: batches that can be in flight; a launch beyond that waits.
        buckets: sizes of the captured graphs.
        graph_use: cost of the graphs.
    """

    slots = _SLOTS

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        graphs: Graphs | None = None,
        *,
        max_batch_tokens: int | None = None,
    ) -> None:
        """Capture a graph for every bucket.

        Args:
            program: the recorded forward pass.
            kernels: module with the functions that ops name.
            arena: memory of the intermediates.
            graphs: captures graphs; None captures graphs of CUDA.
            max_batch_tokens: largest batch of several sequences; None is what the arena holds.
        """
        device, largest = arena.device, arena.largest
        self._program = program
        self._kernels = kernels
        self._arena = arena
        self._graphs = graphs or CudaGraphs(device)
        most = min(max_batch_tokens or arena.max_tokens, arena.max_tokens)
        self.buckets = Buckets(most, largest["sequences"], longest=arena.max_tokens)
        size = InputLayout.of(program.inputs, largest).num_bytes
        self._device_inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        (self._output,) = program.new_outputs(largest, device)
        self._buffers = [
            _Buffers(on_host(self._device_inputs), on_host(self._output)) for _ in range(_SLOTS)
        ]
        self._free: SimpleQueue[_Buffers] = SimpleQueue()
        for buffers in self._buffers:
            self._free.put(buffers)
        # batches are started one at a time, each as a whole
        self._launching = Lock()
        # when the last batch that was started can end at the earliest
        self._earliest_end = 0.0
        with torch.inference_mode():
            self._captured, self.graph_use = capture_each(
                self._graphs, list(self.buckets), self._capture, progress_lines=_PROGRESS_LINES
            )

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`."""
        return self.launch(prompts, options)()

    def launch(self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]) -> Answers:
        """Start a batch and return a function that waits for its answers.

        It must be called once: until then the batch keeps its buffers.

        Raises:
            ValueError: no graph was captured for so large a batch.
        """
        # the longest first, so that the last programs of attention to start are short ones
        unordered = [prompt.num_tokens for prompt in prompts]
        order = sorted(range(len(prompts)), key=unordered.__getitem__, reverse=True)
        lengths = [unordered[i] for i in order]
        bucket = self.buckets.smallest(sum(lengths), len(lengths))
        captured = self._captured[bucket]
        chosen = [prompts[i] for i in order], [options[i] for i in order]
        counts_masks = self._program.row_dimension == "masks"
        masks = sum(prompt.num_masks for prompt in prompts) if counts_masks else 0
        rows = self._output_rows(dims_of(lengths, masks))
        buffers = self._free.get()
        try:
            fill_inputs(captured.inputs[buffers], *chosen)
            with self._launching:
                # the graph writes to this region
                self._arena.allocate(bucket.dims)
                wait = self._start(captured, buffers, rows)
                earliest_end = max(time.monotonic(), self._earliest_end) + captured.seconds
                self._earliest_end = earliest_end
        except BaseException:
            self._free.put(buffers)
            raise

        def answers() -> list[Float32Array]:
            try:
                # until then the wait would take a core from tokenizers and clients
                _sleep_until(earliest_end - _OVERSLEEP_SECONDS)
                wait()
                # the next batch with these buffers overwrites them
                output = buffers.output[:rows].clone().numpy()
            finally:
                self._free.put(buffers)
            found = split_answers(output, chosen[0], self._program.row_dimension)
            return [found[place] for place in np.argsort(order).tolist()]

        return answers

    def stream(self) -> AbstractContextManager[object]:
        """Return the context that makes the stream, and its device, current."""
        return self._graphs.stream()

    def graph(self, tokens: int, sequences: int) -> Replay:
        """Return what starts the graph of this size, on the inputs of the last batch."""
        return self._captured[self.buckets.smallest(tokens, sequences)].replay

    def close(self) -> None:
        """Release the graphs."""
        self._captured.clear()
        self._graphs.close()

    @torch.inference_mode()
    def _start(self, captured: _Captured, buffers: _Buffers, rows: int) -> Callable[[], object]:
        """Start the copies and the graph of a batch; return what waits for them.

        The device has one set of inputs and outputs, since its work runs in order.
        """
        size = captured.input_bytes
        with self._graphs.stream():
            try:
                self._graphs.copy(self._device_inputs[:size], buffers.inputs[:size])
                captured.replay()
                self._graphs.copy(buffers.output[:rows], self._output[:rows])
                return self._graphs.record()
            except BaseException:
                # a copy that was started still uses the buffers
                with suppress(Exception):
                    self._graphs.record()()
                raise

    def _capture(self, bucket: Bucket) -> _Captured:
        dims = bucket.dims
        layout = InputLayout.of(self._program.inputs, dims)
        # inputs of zeros are a batch whose tokens belong to no sequence
        batch = PackedBatch(layout.views(self._device_inputs), dims)
        output = self._output[: self._output_rows(dims)]
        # a plan depends only on the bucket, so every batch gets the same region
        region = self._arena.allocate(dims)

        def forward() -> None:
            self._program.run(batch, self._kernels, region, out=[output])

        replay = self._graphs.capture(forward)
        return _Captured(
            {each: layout.views(each.inputs) for each in self._buffers},
            layout.num_bytes,
            replay,
            min(self._seconds(replay) for _ in range(_TIMED_REPLAYS)),
        )

    def _seconds(self, replay: Replay) -> float:
        with self._graphs.stream():
            began = time.monotonic()
            replay()
            self._graphs.record()()
            return time.monotonic() - began

    def _output_rows(self, dims: Dims) -> int:
        return self._program.outputs[0].at(dims)[0]


def _sleep_until(at: float) -> None:
    left = at - time.monotonic()
    if left > 0:
        time.sleep(left)
