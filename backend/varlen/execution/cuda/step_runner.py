"""Runs the steps of generation on a CUDA GPU.

The ops of a step are shorter on the GPU than the Python that launches them, so each step replays a graph. A decode
step has one degree of freedom, the number of sequences, and a graph for each of a few sizes serves all of them. A step
with a chunk of a prompt has tokens and sequences, and runs in the smallest of the buckets that encoders have, too.
docs/decisions/0050-graphs-of-steps.md has the reasons.

The tokens that a step chooses stay on the device, where the next one takes them. So it can start before the host has
read them; docs/decisions/0059-steps-ahead.md.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.execution.bound_program import BoundProgram
from varlen.execution.cuda.buckets import Bucket, Buckets
from varlen.execution.cuda.graphs import CudaGraphs, Graphs, Replay, capture_each, on_host
from varlen.execution.packing import InputLayout
from varlen.execution.step_packing import (
    DeviceEdits,
    DeviceSearches,
    StepArrays,
    beam_arrays,
    begun_arrays,
    choices_of,
    draw_arrays,
    followed,
    search_arrays,
    step_arrays,
)
from varlen.memory.device_copies import moved
from varlen.memory.usage import Dims, Size
from varlen.program.program import Value
from varlen.request.request import Int32Array
from varlen.scheduling.batch import Chunk
from varlen.scheduling.device_plan import Chosen, DevicePlan, Draws
from varlen.scheduling.iteration.iteration import MAX_IN_FLIGHT
from varlen_kernels.ops import kernels_for
from varlen_kernels.reference.beam_search import SearchResults
from varlen_kernels.reference.logit_edits import EDIT_COLUMNS

# Its length depends on contexts. It is last in the buffer, so that only what is used of it is copied.
_TABLES = "block_ids"
# Behind the tokens that the step before has chosen.
_TOKENS = "token_ids"
# The slot of a token that is written nowhere.
_NO_SLOT = -1
# Where each token of a step lies: among the chosen ones, or among its inputs.
_PLACES = Value("places", (Size(tokens=1),), torch.int32)
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
_OF_CHOICE = (_PLACES, _EDITED_ROWS, _PENALTIES, *_DRAWS)
# Gets `PackedStep.beams` and the inputs of the step.
Follow: TypeAlias = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
# Chosen tokens are as many bytes as keep what follows them aligned.
_ALIGNED_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """Memory of the host for one step in flight.

    Attributes:
        inputs: `[bytes]` uint8, read by the GPU until the step has run.
        tokens: `[rows]` int32, written by the GPU.
        searches: numbers of `SearchResults`, enough for any searches, written by the GPU.
    """

    inputs: Tensor
    tokens: Tensor
    searches: Tensor


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graph of steps of up to these dimensions.

    Attributes:
        dims: its dimensions.
        inputs: its inputs in each set of buffers, by name.
        on_device: its inputs on the device, by name.
        bytes_before_tables: bytes of all inputs but the block tables.
        replay: starts it.
    """

    dims: Dims
    inputs: Mapping[_Buffers, Mapping[str, npt.NDArray[Any]]]
    on_device: Mapping[str, Tensor]
    bytes_before_tables: int
    replay: Replay


class CudaSteps:
    """Starts a program's steps on a GPU. Not for two threads at once.

    Attributes:
        graph_use: cost of the graphs.
    """

    def __init__(
        self,
        bound: BoundProgram,
        *,
        blocks_per_sequence: int,
        blocks_per_source: int = 0,
        graphs: Graphs | None = None,
        searches: DeviceSearches | None = None,
        edits: DeviceEdits | None = None,
        follow: Follow | None = None,
    ) -> None:
        """Capture a graph for each size of step.

        Args:
            bound: the program of a step.
            blocks_per_sequence: blocks of the longest sequence.
            blocks_per_source: blocks of the longest source text.
            graphs: captures them; None is this device's own.
            searches: takes the steps of searches; None if there are none.
            edits: changes logits before tokens are drawn; None if nothing does.
            follow: gives beams their tokens and block tables, and copies blocks, see `DeviceSearches.follow`.
        """
        program, arena = bound.program, bound.arena
        self._bound = bound
        self._blocks_per_sequence = blocks_per_sequence
        self._blocks_per_source = blocks_per_source
        self._graphs = graphs or CudaGraphs(arena.device)
        self._searches, self._edits, self._follow = searches, edits, follow
        # tokens first, tables last
        declared = sorted(program.inputs, key=lambda value: value.name == _TABLES)
        declared.sort(key=lambda value: value.name != _TOKENS)
        self._declared = [*declared[:-1], *_OF_CHOICE, declared[-1]]
        rows, tokens = arena.largest["logit_rows"], arena.largest["tokens"]
        most = {"tokens": tokens, "sequences": rows, "logit_rows": rows}
        # a step of prompts has tables for each of its tokens
        blocks = {"blocks": rows * blocks_per_sequence, "source_blocks": tokens * blocks_per_source}
        size = InputLayout.of(self._declared, {**most, **blocks}).num_bytes
        # inputs of tokens that the host knows follow those that the step before has chosen
        self._first_input = -(-rows // _ALIGNED_TOKENS) * _ALIGNED_TOKENS
        self._words = torch.zeros(
            self._first_input + -(-size // 4), dtype=torch.int32, device=arena.device
        )
        self._device = self._words[self._first_input :].view(torch.uint8)
        self._chosen = self._words[:rows]
        self._best = torch.zeros(rows, dtype=torch.int64, device=arena.device)
        self._token_ids = torch.zeros(tokens, dtype=torch.int32, device=arena.device)
        results = SearchResults.numbers(rows, rows, arena.device)
        self._buffers = [
            _Buffers(on_host(self._device), on_host(self._chosen), on_host(results))
            for _ in range(MAX_IN_FLIGHT)
        ]
        self._next_buffers = cycle(self._buffers)
        self._kernels = kernels_for(arena.device)
        (self._logits,) = program.new_outputs(most, arena.device)
        self._decode_sizes = _decode_sizes(rows)
        self._buckets = Buckets(tokens, rows)
        decode_steps = {Bucket(size, size) for size in self._decode_sizes}
        sizes = sorted(decode_steps.union(self._buckets), reverse=True)
        with torch.inference_mode():
            self._captured, self.graph_use = capture_each(self._graphs, sizes, self._capture)

    def stream(self) -> AbstractContextManager[object]:
        """Return the context that makes the stream, and its device, current."""
        return self._graphs.stream()

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one.

        Called in the context of `stream`. The caller reads the logits back, which waits for the device; a step without
        logits waits here. So the step after the next one may overwrite the inputs on the host.
        """
        self._start(chunks, None, next(self._next_buffers), {})
        rows = sum(chunk.num_logit_rows for chunk in chunks)
        if not rows:
            self.wait()
        return self.last_logits(rows)

    def last_logits(self, rows: int) -> Tensor:
        """Return the logits of the step that was started last, `[rows, vocabulary]`."""
        return self._logits[:rows]

    def start(
        self, chunks: Sequence[Chunk], choice: DevicePlan, given: Int32Array
    ) -> Callable[[], Chosen]:
        """Start a step; return a function that waits for what is chosen here.

        Called in the context of `stream`, for at most two steps before the function of the first one is called.

        Args:
            chunks: chunks of the step.
            choice: the part of the choice that is left to the GPU.
            given: the choices of the host for beams, see `Chooser.given`.
        """
        buffers, rows = next(self._next_buffers), sum(chunk.num_logit_rows for chunk in chunks)
        draws, numbers = choice.draws, None
        begun = begun_arrays(None if draws is None else draws.edits)
        beams, searches = beam_arrays(chunks), search_arrays(chunks, choice)
        if beams:
            beams["given"][:] = given
        here: Sequence[Mapping[str, Tensor]] = ({}, {}, {})
        if beams or searches or begun:
            here = moved((beams, searches, begun), self._words.device)
        beams_here, searches_here, begun_here = here
        captured = self._start(chunks, draws, buffers, beams_here)
        if draws is not None and not draws.is_greedy:
            self._draw(draws, captured.on_device, rows, begun_here)
        if rows and draws is not None:
            self._graphs.copy(buffers.tokens[:rows], self._chosen[:rows])
        if searches:
            assert self._searches is not None
            results = self._searches.advance(self._logits[:rows], searches, searches_here)
            numbers = buffers.searches[: len(results)]
            self._graphs.copy(numbers, results)
        if draws is None and numbers is None:
            # the host waits for the logits
            return Chosen
        wait = self._graphs.record()

        def chosen() -> Chosen:
            wait()
            token_ids = () if draws is None else buffers.tokens[:rows].tolist()
            if numbers is None:
                return Chosen(token_ids)
            # the step after the next one writes there again
            return Chosen(token_ids, choices_of(numbers.clone(), searches))

        return chosen

    def _draw(
        self,
        draws: Draws,
        on_device: Mapping[str, Tensor],
        rows: int,
        begun: Mapping[str, Tensor],
    ) -> None:
        """Draw the tokens of the step that was started last.

        Args:
            draws: options of the draws.
            on_device: inputs of the step.
            rows: rows of its logits.
            begun: edit lists that the host sends.
        """
        logits = self._logits[:rows]
        if draws.edits is not None:
            assert self._edits is not None
            edited = slice(len(draws.edits.rows))
            self._edits.apply(
                logits,
                self._token_ids,
                on_device["logit_rows"],
                on_device[_EDITED_ROWS.name][edited],
                on_device[_PENALTIES.name][edited],
                begun,
            )
        limits = [on_device[value.name][:rows] for value in _DRAWS]
        self._kernels.sample_tokens(logits, *limits, out=self._chosen[:rows])

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """Give the next step the tokens that were chosen; in the context of `stream`."""
        chosen = on_host(self._chosen[: len(token_ids)])
        chosen.numpy()[:] = token_ids
        # torch keeps pinned memory until the copy has run
        self._chosen[: len(chosen)].copy_(chosen, non_blocking=True)

    def _start(
        self,
        chunks: Sequence[Chunk],
        draws: Draws | None,
        buffers: _Buffers,
        beams: Mapping[str, Tensor],
    ) -> _Captured:
        """Start a step; return its graph."""
        arrays = step_arrays(chunks, self._bound.block_size)
        tokens, rows = len(arrays["token_ids"]), len(arrays["logit_rows"])
        sequences = len(arrays["context_lens"])
        captured = self._captured[self._bucket(tokens, max(sequences, rows))]
        # the graph writes to this region
        self._bound.arena.allocate(captured.dims)
        inputs = captured.inputs[buffers]
        _fill(inputs, arrays)
        places = inputs[_PLACES.name]
        places[:] = np.arange(self._first_input, self._first_input + len(places))
        of_tokens, outputs = followed(chunks)
        places[of_tokens] = outputs
        if draws is not None and not draws.is_greedy:
            for name, numbers in draw_arrays(draws).items():
                inputs[name][:rows] = numbers
        if draws is not None and draws.edits is not None:
            edited = len(draws.edits.rows)
            inputs[_EDITED_ROWS.name][:edited] = draws.edits.rows
            inputs[_PENALTIES.name][:edited] = draws.edits.penalties
        num_bytes = captured.bytes_before_tables + arrays[_TABLES].nbytes
        self._graphs.copy(self._device[:num_bytes], buffers.inputs[:num_bytes])
        if beams:
            assert self._follow is not None
            self._follow(beams, captured.on_device)
        captured.replay()
        return captured

    def wait(self) -> None:
        """Wait until everything that was started has run."""
        self._graphs.record()()

    def graph(self, sequences: int) -> Replay:
        """Return what starts a decode step's graph, on the inputs of the last step."""
        return self._captured[self._bucket(sequences, sequences)].replay

    def close(self) -> None:
        """Release the graphs."""
        self._captured.clear()
        self._graphs.close()

    def _bucket(self, tokens: int, sequences: int) -> Bucket:
        if tokens <= sequences:
            size = next(size for size in self._decode_sizes if size >= sequences)
            return Bucket(size, size)
        return self._buckets.smallest(tokens, sequences)

    def _capture(self, bucket: Bucket) -> _Captured:
        dims = {
            "tokens": bucket.tokens,
            "sequences": bucket.sequences,
            "logit_rows": bucket.sequences,
            "blocks": bucket.sequences * self._blocks_per_sequence,
            "source_blocks": bucket.tokens * self._blocks_per_source,
        }
        # outside of the capture, in which no memory may be released
        region = self._bound.arena.allocate(dims)
        # inputs of zeros, but no slot: tokens of no sequence, which write nothing
        self._device.zero_()
        layout = InputLayout.of(self._declared, dims)
        inputs = layout.views(self._device)
        inputs["slots"].fill_(_NO_SLOT)
        on_device = dict(inputs)
        for value in _OF_CHOICE:
            del inputs[value.name]
        places = on_device[_PLACES.name]
        inputs[_TOKENS] = self._token_ids[: bucket.tokens]
        rows = bucket.sequences

        def work() -> None:
            torch.index_select(self._words, 0, places, out=inputs[_TOKENS])
            self._bound.run_in(region, inputs, dims, [self._logits[:rows]])
            torch.argmax(self._logits[:rows], 1, out=self._best[:rows])
            self._chosen[:rows].copy_(self._best[:rows])

        replay = self._graphs.capture(work)
        buffers = {
            each: {name: view.numpy() for name, view in layout.views(each.inputs).items()}
            for each in self._buffers
        }
        *_, (_, _, tables) = layout.places
        return _Captured(dims, buffers, on_device, tables.start, replay)


def _fill(inputs: Mapping[str, npt.NDArray[Any]], arrays: StepArrays) -> None:
    """Write the arrays of a step into its inputs on the host.

    Places that are left belong to no token and to no sequence.
    """
    for name, array in arrays.items():
        into = inputs.get(name)
        if into is None:
            # no program reads all of them
            continue
        used = len(array)
        into[:used] = array
        match name:
            case "slots":
                into[used:] = _NO_SLOT
            case "cu_seqlens" | "cu_blocks" | "cu_source_blocks":
                into[used:] = into[used - 1]
            case "source_rows":
                # each token is a row
                into[used:] = range(used, len(into))
            case "block_ids" | "source_block_ids":
                # nothing reads beyond the bounds
                pass
            case _:
                into[used:] = 0


def _decode_sizes(most: int) -> list[int]:
    """Return the numbers of sequences that have a graph, ascending."""
    return [*(size for size in (1, 2, 4) if size < most), *range(8, most, 8), most]
