"""Runs the programs of a model on a CUDA GPU by replaying graphs.

The graphs are captured at load: a small model's ops are shorter on the GPU than the Python that launches them. A batch
is one copy of its inputs, one graph, one copy of its result. Meanwhile the next one is packed into other buffers and
started. docs/decisions/0029-gpu-executor.md has the reasons.

Graphs of decode steps are by the number of sequences and the longest context; docs/decisions/0129-graphs-by-context.md.
A step with a chunk of a prompt runs in the smallest bucket, as a batch of an encoder does;
docs/decisions/0050-graphs-of-steps.md. The tokens that a step chooses stay on the device, where the next one takes
them before the host has read them; docs/decisions/0059-steps-ahead.md. Each size has three graphs: for the best tokens,
for tokens that are drawn, and for tokens drawn after edits of the logits. Source texts run in an encoder's graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import cycle
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.execution.arenas import MOST_ROWS, few_dims
from varlen.execution.cuda.graphs import Bucket, Buckets, CudaGraphs, Replay, capture_each, on_host
from varlen.execution.packing import NO_SLOT, Arrays, InputLayout, PackedStep, fill_inputs
from varlen.execution.token_state import DeviceEdits, DeviceSearches, choices_of
from varlen.memory.arena import Arena, alignment_of, moved
from varlen.memory.planner import Dims, Layout, Region, Size, memory_errors
from varlen.program.program import NO_STATES, PackedBatch, Program, State, Value
from varlen.scheduling.batch import MAX_STEPS
from varlen.scheduling.device_plan import Chosen
from varlen_kernels.ops import decode_programs, kernels_for
from varlen_kernels.reference.beam_search import SearchResults
from varlen_kernels.reference.logit_edits import EDIT_COLUMNS

# Log lines about the progress of the captures.
_PROGRESS_LINES = 4
# The first replay of a graph takes longer.
_TIMED_REPLAYS = 3
# The system may end a sleep so much too late.
_OVERSLEEP_SECONDS = 1e-4

# Its length depends on contexts. It is last in the buffer, so that only what is used of it is copied.
_TABLES = "block_ids"
# Inputs of the step; they start after the tokens that the previous step chose.
_TOKENS = "token_ids"
# Where each token of a step lies: among the chosen ones, or among its inputs.
_WORD_INDICES = Value("word_indices", (Size(tokens=1),), torch.int32)
# What tokens are drawn with, as `sample_tokens` takes it.
_ROW = (Size(logit_rows=1),)
_DRAWS = (
    Value("temperature", _ROW, torch.float32),
    Value("top_k", _ROW, torch.int32),
    Value("top_p", _ROW, torch.float32),
    Value("min_p", _ROW, torch.float32),
    Value("uniform", _ROW, torch.float64),
)
# What changes the logits before, as `edit_logits` takes it; no more rows are edited than there are.
_EDITED_ROWS = Value("edited_rows", (*_ROW, Size(EDIT_COLUMNS)), torch.int32)
_PENALTIES = Value("penalties", (*_ROW, Size(3)), torch.float32)
# Inputs that the program does not read.
_UNREAD = (_WORD_INDICES, _EDITED_ROWS, _PENALTIES, *_DRAWS)
# Gets `PackedStep.beams` and the inputs of the step.
Follow: TypeAlias = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
# Longest contexts of graphs of decode steps, in tokens, beside the longest of the model.
_CONTEXTS = (256, 512)
# Chosen tokens are as many bytes as keep what follows them aligned.
_ALIGNED_TOKENS = 64


@dataclass(frozen=True, slots=True, order=True)
class _StepSize(Bucket):
    """The size of a step.

    Attributes:
        blocks: KV blocks of the longest context.
    """

    blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """Memory of the host for one batch in flight.

    Attributes:
        inputs: `[bytes]` uint8, read by the GPU until the batch has run.
        results: memory that the GPU writes, like its own.
    """

    inputs: Tensor
    results: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graph of one bucket, and the memory that it reads and writes.

    Attributes:
        inputs: its inputs in each set of buffers, by name.
        input_bytes: bytes of the inputs that every batch brings.
        replay, sampled, draw: graphs that choose the best tokens of a step, that draw them, and of the draw alone.
    """

    dims: Dims
    inputs: Mapping[_Buffers, Mapping[str, npt.NDArray[Any]]]
    on_device: Mapping[str, Tensor]
    input_bytes: int
    replay: Replay
    sampled: Replay | None = None
    draw: Replay | None = None


class _GraphRunner:
    """The graphs of one program, one for each size of batch."""

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        graphs: CudaGraphs | None,
        states: Mapping[str, Tensor],
    ) -> None:
        self.program = program
        self.arena = arena
        self._kernels, self._states = kernels, states
        self.graphs = graphs or CudaGraphs(arena.device)

    def _capture_all(
        self,
        inputs: Tensor,
        declared: Sequence[Value],
        results: Sequence[Tensor],
        sizes: Sequence[Bucket],
        *,
        slots: int,
        progress_lines: int = 1,
    ) -> None:
        """Capture a graph for each size.

        Args:
            inputs: `[bytes]` uint8 on the device.
            declared: the inputs that lie there.
            results: memory on the device that the host reads.
            slots: batches that may be in flight.
            progress_lines: see `capture_each`.
        """
        self._device_inputs, self._declared = inputs, declared
        self._buffers = [
            _Buffers(on_host(inputs), [on_host(each) for each in results]) for _ in range(slots)
        ]
        with torch.inference_mode():
            self._captured, self.graph_use = capture_each(
                self.graphs, sizes, self._capture, progress_lines=progress_lines
            )

    def stream(self) -> AbstractContextManager[object]:
        """Return the context that makes the stream, and its device, current."""
        return self.graphs.stream()

    def close(self) -> None:
        """Release the graphs."""
        self._captured.clear()
        self.graphs.close()

    def _dims(self, bucket: Bucket) -> Dims:
        return bucket.dims

    def _work(self, dims: Dims, inputs: dict[str, Tensor], region: Region) -> Callable[[], None]:
        """Return the work of a graph, given views of its inputs."""
        raise NotImplementedError

    def _run_program(
        self, dims: Dims, inputs: Mapping[str, Tensor], region: Region, *out: Tensor
    ) -> None:
        batch = PackedBatch(inputs, dims)
        self.program.run(batch, self._kernels, region, states=self._states, out=out)

    def _capture(self, bucket: Bucket) -> _Captured:
        dims = self._dims(bucket)
        # outside of the capture, in which no memory may be released; a plan depends only on the bucket, so every batch
        # gets the same region
        region = self.arena.allocate(dims)
        layout = InputLayout.of(self._declared, dims)
        # inputs of zeros, but no slot: tokens of no sequence, which write nothing
        self._device_inputs.zero_()
        inputs = layout.views(self._device_inputs)
        if "slots" in inputs:
            inputs["slots"].fill_(NO_SLOT)
        replays = self._replays(dims, inputs, region)
        buffers = {
            each: {name: view.numpy() for name, view in layout.views(each.inputs).items()}
            for each in self._buffers
        }
        value, _, last = layout.parts[-1]
        num_bytes = last.start if value.name == _TABLES else layout.num_bytes
        return _Captured(dims, buffers, inputs, num_bytes, *replays)

    def _replays(
        self, dims: Dims, inputs: Mapping[str, Tensor], region: Region
    ) -> tuple[Replay, ...]:
        """Return the graphs of a bucket, see `_Captured`."""
        return (self.graphs.capture(self._work(dims, dict(inputs), region)),)


class CudaRunner(_GraphRunner):
    """Runs whole sequences, for every batch that its arena holds.

    Any thread may call `launch` and the function that it returns.

    Attributes:
        slots: batches that can be in flight; a launch beyond that waits.
        buckets: sizes of the captured graphs.
    """

    # one runs, the next one is ready on the GPU's queue
    slots = 2
    # so the last programs of attention to start are short ones
    longest_first, runs_at_launch = True, False

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        graphs: CudaGraphs | None = None,
        *,
        max_batch_tokens: int | None = None,
        states: Mapping[str, Tensor] = NO_STATES,
    ) -> None:
        """Capture a graph for every bucket.

        Args:
            program: the recorded forward pass.
            kernels: module with the functions that ops name.
            graphs: captures graphs; None captures graphs of CUDA.
            max_batch_tokens: largest batch of several sequences; None is what the arena holds.
            states: the states of the program, by name.
        """
        super().__init__(program, kernels, arena, graphs, states)
        largest = arena.largest
        most = min(max_batch_tokens or arena.max_tokens, arena.max_tokens)
        self.buckets = Buckets(most, largest["sequences"], longest=arena.max_tokens)
        self.row_dimension = program.row_dimension
        self.input_names = [value.name for value in program.inputs]
        size = InputLayout.of(program.inputs, largest).num_bytes
        inputs = torch.zeros(size, dtype=torch.uint8, device=arena.device)
        (self._output,) = program.new_outputs(largest, arena.device)
        self._capture_all(
            inputs,
            program.inputs,
            [self._output],
            list(self.buckets),
            slots=self.slots,
            progress_lines=_PROGRESS_LINES,
        )
        self._free: SimpleQueue[_Buffers] = SimpleQueue()
        for buffers in self._buffers:
            self._free.put(buffers)
        # seconds of each graph without tokens; no batch takes less
        self._seconds = {
            bucket: min(self._timed(each.replay) for _ in range(_TIMED_REPLAYS))
            for bucket, each in self._captured.items()
        }
        # batches are started one at a time, each as a whole
        self._launching = Lock()
        # when the last batch that was started can end at the earliest
        self._earliest_end = 0.0

    @memory_errors()
    def launch(self, arrays: Arrays, dims: Dims) -> Callable[[], Tensor | None]:
        """Start a batch and return a function that waits for its output on the host.

        It must be called once: until then the batch keeps its buffers.

        Raises:
            ValueError: no graph was captured for so large a batch.
        """
        bucket = self.buckets.smallest(dims["tokens"], dims["sequences"])
        captured, rows = self._captured[bucket], self._output_rows(dims)
        buffers = self._free.get()
        try:
            fill_inputs(captured.inputs[buffers], arrays)
            with self._launching:
                # the graph writes to this region
                self.arena.allocate(captured.dims)
                wait = self._start(captured, buffers, rows)
                earliest_end = max(time.monotonic(), self._earliest_end) + self._seconds[bucket]
                self._earliest_end = earliest_end
        except BaseException:
            self._free.put(buffers)
            raise

        @memory_errors()
        def output() -> Tensor:
            try:
                # until then the wait would take a core from tokenizers and clients
                _sleep_until(earliest_end - _OVERSLEEP_SECONDS)
                wait()
                # the next batch with these buffers overwrites them
                return buffers.results[0][:rows].clone()
            finally:
                self._free.put(buffers)

        return output

    def graph(self, tokens: int, sequences: int) -> Replay:
        """Return what starts the graph of this size, on the inputs of the last batch."""
        return self._captured[self.buckets.smallest(tokens, sequences)].replay

    @torch.inference_mode()
    def _start(self, captured: _Captured, buffers: _Buffers, rows: int) -> Callable[[], object]:
        """Start the copies and the graph of a batch; return what waits for them.

        The device has one set of inputs and outputs, since its work runs in order.
        """
        size = captured.input_bytes
        with self.graphs.stream():
            try:
                self.graphs.copy(self._device_inputs[:size], buffers.inputs[:size])
                captured.replay()
                self.graphs.copy(buffers.results[0][:rows], self._output[:rows])
                return self.graphs.record()
            except BaseException:
                # a copy that was started still uses the buffers
                with suppress(Exception):
                    self.graphs.record()()
                raise

    def _work(self, dims: Dims, inputs: dict[str, Tensor], region: Region) -> Callable[[], None]:
        output = self._output[: self._output_rows(dims)]
        return lambda: self._run_program(dims, inputs, region, output)

    def _timed(self, replay: Replay) -> float:
        with self.graphs.stream():
            began = time.monotonic()
            replay()
            self.graphs.record()()
            return time.monotonic() - began

    def _output_rows(self, dims: Dims) -> int:
        return self.program.outputs[0].at(dims)[0]


class CudaSteps(_GraphRunner):
    """Starts the steps of a decoder. Not for two threads at once.

    Attributes:
        on_host: `[logit rows, vocabulary]` fp32, where `run` leaves logits for the engine of another process, if any.
    """

    on_host: Tensor | None = None

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        states: Mapping[str, Tensor],
        *,
        blocks_per_sequence: int,
        blocks_per_source: int = 0,
        graphs: CudaGraphs | None = None,
        searches: DeviceSearches | None = None,
        edits: DeviceEdits | None = None,
        follow: Follow | None = None,
        few_rows: Program | None = None,
    ) -> None:
        """Capture a graph for each size of step.

        Args:
            kernels, arena, graphs: arguments of `CudaRunner`.
            blocks_per_source: blocks of the longest source text.
            searches: takes the steps of searches; None if there are none.
            edits: changes logits before tokens are drawn; None if nothing does.
            follow: gives beams their tokens and block tables, and copies blocks.
            few_rows: the program for at most MOST_ROWS tokens, for which the arena has room; None is the same one.
        """
        super().__init__(program, kernels, arena, graphs, states)
        self._blocks_per_sequence = blocks_per_sequence
        self._blocks_per_source = blocks_per_source
        self._searches, self._edits, self._follow = searches, edits, follow
        # tokens first, tables last
        declared = sorted(program.inputs, key=lambda value: value.name == _TABLES)
        declared.sort(key=lambda value: value.name != _TOKENS)
        declared = [*declared[:-1], *_UNREAD, declared[-1]]
        device, rows, tokens = arena.device, arena.largest["logit_rows"], arena.largest["tokens"]
        most = {"tokens": tokens, "sequences": rows, "logit_rows": rows}
        # a step of prompts has tables for each of its tokens
        blocks = {"blocks": rows * blocks_per_sequence, "source_blocks": tokens * blocks_per_source}
        size = InputLayout.of(declared, {**most, **blocks}).num_bytes
        # inputs of tokens that the host knows follow those that the step before has chosen
        self._first_input = -(-rows // _ALIGNED_TOKENS) * _ALIGNED_TOKENS
        words = self._first_input + -(-size // 4)
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._chosen = self._words[:rows]
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._draws = kernels_for(device)
        self._few_rows = program, arena
        if few_rows is not None:
            layout = Layout(few_rows.buffers, alignment_of(device))
            self._few_rows = few_rows, arena.beside(layout, few_dims(arena.largest))
        (self._logits,) = program.new_outputs(most, device)
        # attention to the tokens of the step's own sequences
        self._reads = [
            (op.attributes, cache)
            for op in program.ops
            if op.kernel == "attention_paged" and op.operands[5] == declared[-1]
            for cache in op.operands[1:2]
            if isinstance(cache, State)
        ]
        self._decode_sizes = {size: self._contexts(size) for size in _decode_sizes(rows)}
        self._buckets = Buckets(tokens, rows)
        decode_steps = {
            _StepSize(size, size, longest)
            for size, contexts in self._decode_sizes.items()
            for longest in contexts
        }
        of_prompts = {
            _StepSize(each.tokens, each.sequences, blocks_per_sequence) for each in self._buckets
        }
        self._capture_all(
            self._words[self._first_input :].view(torch.uint8),
            declared,
            # enough for any searches
            [self._chosen, SearchResults.numbers(rows, rows, device)],
            sorted(decode_steps | of_prompts, reverse=True),
            slots=MAX_STEPS,
        )
        self._next_buffers = cycle(self._buffers)

    def run(self, step: PackedStep) -> Chosen:
        """Run a step; return what is chosen here. Called in the context of `stream`."""
        chosen = self.start(step)()
        self.wait()
        rows = len(step.inputs["logit_rows"])
        if self.on_host is not None and step.is_read:
            self.on_host[:rows].copy_(self._logits[:rows])
        return chosen

    def last_logits(self, rows: int) -> Tensor:
        """Return the logits of the step that was started last, `[rows, vocabulary]`."""
        return self._logits[:rows]

    def start(self, step: PackedStep) -> Callable[[], Chosen]:
        """Start a step; return a function that waits for what is chosen here.

        Called in the context of `stream`, for at most two steps before the function of the first one is called.
        """
        buffers, rows = next(self._next_buffers), len(step.inputs["logit_rows"])
        begun = {name: step.edits[name] for name in step.edits if name not in _OF_ROWS}
        here: Sequence[Mapping[str, Tensor]] = ({}, {}, {})
        if step.beams or step.searches or begun:
            here = moved((step.beams, step.searches, begun), self._words.device)
        beams_here, searches_here, begun_here = here
        captured = self._start(step, buffers, beams_here)
        if rows and step.edits:
            self._draw(step, captured, rows, begun_here)
        chosen_here, found_here = buffers.results
        if rows and step.draws:
            self.graphs.copy(chosen_here[:rows], self._chosen[:rows])
        numbers = None
        if step.searches:
            assert self._searches is not None
            results = self._searches.advance(self._logits[:rows], step.searches, searches_here)
            numbers = found_here[: len(results)]
            self.graphs.copy(numbers, results)
        if not step.draws and numbers is None:
            # the host waits for the logits
            return Chosen
        wait = self.graphs.record()

        def chosen() -> Chosen:
            wait()
            token_ids = chosen_here[:rows].tolist() if step.draws else ()
            if numbers is None:
                return Chosen(token_ids)
            # the step after the next one writes there again
            found = choices_of(numbers.clone().numpy()[None], len(step.searches["searches"]))
            return Chosen(token_ids, found)

        return chosen

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """Give the next step the tokens that were chosen; in the context of `stream`."""
        chosen = on_host(self._chosen[: len(token_ids)])
        chosen.numpy()[:] = token_ids
        # torch keeps pinned memory until the copy has run
        self._chosen[: len(chosen)].copy_(chosen, non_blocking=True)

    def wait(self) -> None:
        """Wait until everything that was started has run."""
        self.graphs.record()()

    def graph(self) -> Replay:
        """Return what starts the graph of the last step; it chooses the best tokens."""
        return self._last.replay

    def _start(self, step: PackedStep, buffers: _Buffers, beams: Mapping[str, Tensor]) -> _Captured:
        arrays = step.inputs
        tokens, rows = len(arrays[_TOKENS]), len(arrays["logit_rows"])
        sequences = len(arrays["context_lens"])
        blocks = int(np.diff(arrays["cu_blocks"]).max())
        captured = self._captured[self._bucket(tokens, max(sequences, rows), blocks)]
        self._last = captured
        # the graph writes to this region
        self._form(captured.dims)[1].allocate(captured.dims)
        inputs = captured.inputs[buffers]
        fill_inputs(inputs, arrays)
        indices = inputs[_WORD_INDICES.name]
        indices[:] = np.arange(self._first_input, self._first_input + len(indices))
        of_tokens, outputs = step.follows
        indices[of_tokens] = outputs
        if step.edits or "uniform" in step.draws:
            for name, numbers in step.draws.items():
                inputs[name][:rows] = numbers
        for name, input_name in _OF_ROWS.items() if step.edits else ():
            inputs[input_name][: len(step.edits[name])] = step.edits[name]
        num_bytes = captured.input_bytes + arrays[_TABLES].nbytes
        self.graphs.copy(self._device_inputs[:num_bytes], buffers.inputs[:num_bytes])
        if beams:
            assert self._follow is not None
            self._follow(beams, captured.on_device)
        is_sampled = rows and "uniform" in step.draws and not step.edits
        replay = captured.sampled if is_sampled else captured.replay
        assert replay is not None
        replay()
        return captured

    def _draw(
        self,
        step: PackedStep,
        captured: _Captured,
        rows: int,
        begun: Mapping[str, Tensor],
    ) -> None:
        """Edit the logits of the step that was started last, and draw its tokens.

        Args:
            begun: edit lists that the host sends.
        """
        assert self._edits is not None
        edited, on_device = slice(len(step.edits["rows"])), captured.on_device
        self._edits.apply(
            self._logits[:rows],
            self._token_ids,
            on_device["logit_rows"],
            on_device[_EDITED_ROWS.name][edited],
            on_device[_PENALTIES.name][edited],
            **begun,
        )
        assert captured.draw is not None
        captured.draw()

    def _replays(
        self, dims: Dims, inputs: Mapping[str, Tensor], region: Region
    ) -> tuple[Replay, ...]:
        rows, limits = dims["logit_rows"], [inputs[value.name] for value in _DRAWS]
        step = self._work(dims, dict(inputs), region)

        def draw() -> None:
            # rows of no sequence get tokens that nothing reads
            self._draws.sample_tokens(self._logits[:rows], *limits, out=self._chosen[:rows])

        def sampled() -> None:
            step()
            draw()

        # it runs all kernels, so the others need not run before their captures
        with_draw = self.graphs.capture(sampled)
        alone = self.graphs.capture(draw, has_run=True)
        return self.graphs.capture(step, has_run=True), with_draw, alone

    def _contexts(self, rows: int) -> list[int]:
        """Return the blocks of the longest context of each graph of a decode step, ascending.

        A graph for short contexts starts fewer programs than the next one.
        """
        kept = [self._blocks_per_sequence]
        for tokens in reversed(_CONTEXTS if self._reads else ()):
            blocks = -(-tokens // self._reads[0][1].shape[2])
            if self._programs(rows, blocks) < self._programs(rows, kept[0]):
                kept.insert(0, blocks)
        return kept

    def _programs(self, rows: int, blocks: int) -> int:
        """Return the number of programs that read one context, in all layers."""
        found = 0
        for attributes, cache in self._reads:
            _, num_kv_heads, block_size, head_dim = cache.shape
            found += decode_programs(
                self.arena.device,
                rows=rows,
                longest=blocks * block_size,
                num_heads=attributes["num_heads"],
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=cache.dtype,
                window=attributes["window"],
            )
        return found

    def _form(self, dims: Dims) -> tuple[Program, Arena]:
        is_few = dims["tokens"] <= MOST_ROWS
        return self._few_rows if is_few else (self.program, self.arena)

    def _bucket(self, tokens: int, sequences: int, blocks: int) -> _StepSize:
        if tokens <= sequences:
            size = next(size for size in self._decode_sizes if size >= sequences)
            longest = next(each for each in self._decode_sizes[size] if each >= blocks)
            return _StepSize(size, size, longest)
        bucket = self._buckets.smallest(tokens, sequences)
        return _StepSize(bucket.tokens, bucket.sequences, self._blocks_per_sequence)

    def _dims(self, bucket: Bucket) -> Dims:
        assert isinstance(bucket, _StepSize)
        return {
            "tokens": bucket.tokens,
            "sequences": bucket.sequences,
            "logit_rows": bucket.sequences,
            "blocks": bucket.sequences * bucket.blocks,
            "source_blocks": bucket.tokens * self._blocks_per_source,
        }

    def _work(self, dims: Dims, inputs: dict[str, Tensor], region: Region) -> Callable[[], None]:
        indices = inputs[_WORD_INDICES.name]
        for value in _UNREAD:
            del inputs[value.name]
        inputs[_TOKENS] = self._token_ids[: dims["tokens"]]
        rows = dims["logit_rows"]
        (program, arena), out = self._form(dims), [self._logits[:rows]]
        region = arena.allocate(dims)
        chooses = len(program.outputs) > 1
        if chooses:
            out.append(self._chosen[:rows])
        batch = PackedBatch(inputs, dims)

        def work() -> None:
            torch.index_select(self._words, 0, indices, out=inputs[_TOKENS])
            program.run(batch, self._kernels, region, states=self._states, out=out)
            if chooses:
                return
            torch.argmax(self._logits[:rows], 1, out=self._best[:rows])
            self._chosen[:rows].copy_(self._best[:rows])

        return work


class CudaSources(_GraphRunner):
    """Starts the encoder of source texts. Not for two threads at once.

    Keys and values go into the caches of the decoder.
    """

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        states: Mapping[str, Tensor],
        graphs: CudaGraphs | None = None,
    ) -> None:
        """Capture a graph for every bucket.

        Args:
            kernels, arena: arguments of `CudaRunner`.
            graphs: the graphs of the steps, whose work follows in the same order.
        """
        super().__init__(program, kernels, arena, graphs, states)
        largest = arena.largest
        self._buckets = Buckets(largest["tokens"], largest["sequences"])
        size = InputLayout.of(program.inputs, largest).num_bytes
        inputs = torch.zeros(size, dtype=torch.uint8, device=arena.device)
        self._capture_all(inputs, program.inputs, [], list(self._buckets), slots=MAX_STEPS)
        self._next_buffers = cycle(self._buffers)

    def start(self, arrays: Arrays, dims: Dims) -> None:
        """Start a batch, without waiting for it.

        Called in the context of `stream`, for at most two steps before the first one has run.
        """
        captured = self._captured[self._buckets.smallest(dims["tokens"], dims["sequences"])]
        buffers = next(self._next_buffers)
        # the graph writes to this region
        self.arena.allocate(captured.dims)
        fill_inputs(captured.inputs[buffers], arrays)
        num_bytes = captured.input_bytes
        self.graphs.copy(self._device_inputs[:num_bytes], buffers.inputs[:num_bytes])
        captured.replay()

    def _dims(self, bucket: Bucket) -> Dims:
        return {"tokens": bucket.tokens, "sequences": bucket.sequences, "logit_rows": 0}

    def _work(self, dims: Dims, inputs: dict[str, Tensor], region: Region) -> Callable[[], None]:
        return lambda: self._run_program(dims, inputs, region)


class OpsOnDevice:
    """Runs padded batches op by op: each has shapes of its own.

    Any thread may call `launch` and the function that it returns.

    Attributes:
        slots: batches that can be in flight.
    """

    slots = 2
    longest_first, runs_at_launch = False, False

    def __init__(
        self,
        program: Program,
        kernels: object,
        arena: Arena,
        graphs: CudaGraphs,
        *,
        states: Mapping[str, Tensor] = NO_STATES,
    ) -> None:
        """Use a program.

        Args:
            kernels, arena, states: arguments of `CudaRunner`.
            graphs: has the stream.
        """
        self.program, self._kernels = program, kernels
        self.row_dimension = program.row_dimension
        self.input_names = [value.name for value in program.inputs]
        self._arena, self._states, self._graphs = arena, states, graphs
        # batches are started one at a time, each as a whole
        self._launching = Lock()

    @memory_errors()
    @torch.inference_mode()
    def launch(self, arrays: Arrays, dims: Dims) -> Callable[[], Tensor | None]:
        """Start a batch and return a function that waits for its output on the host."""
        device = self._arena.device
        with self._launching, self._graphs.stream():
            inputs = {}
            for name, array in arrays.items():
                here = torch.from_numpy(array)
                pinned = torch.empty_like(here, pin_memory=True).copy_(here)
                # torch keeps pinned memory until the copy has run
                inputs[name] = pinned.to(device, non_blocking=True)
            batch, region = PackedBatch(inputs, dims), self._arena.allocate(dims)
            (output,) = self.program.run(batch, self._kernels, region, states=self._states)
            answer = on_host(output)
            self._graphs.copy(answer, output)
            wait = self._graphs.record()

        @memory_errors()
        def answers() -> Tensor:
            wait()
            return answer

        return answers

    def close(self) -> None:
        """Release the stream."""
        self._graphs.close()


# Input of the GPU for each array of edits that has rows; others are lists that begin.
_OF_ROWS = {"rows": _EDITED_ROWS.name, "penalties": _PENALTIES.name}


def _sleep_until(at: float) -> None:
    left = at - time.monotonic()
    if left > 0:
        time.sleep(left)


def _decode_sizes(most: int) -> list[int]:
    return [*(size for size in (1, 2, 4) if size < most), *range(8, most, 8), most]
