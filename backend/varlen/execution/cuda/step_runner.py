"""Runs the steps of generation on a CUDA GPU.

The ops of a step are shorter on the GPU than the Python that launches them, so each step replays a graph. A decode
step has one degree of freedom, the number of sequences, and a graph for each of a few sizes serves all of them. A step
with a chunk of a prompt has tokens and sequences, and runs in the smallest of the buckets that encoders have, too.
docs/decisions/0050-graphs-of-steps.md has the reasons.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from varlen.execution.bound_program import BoundProgram
from varlen.execution.cuda.buckets import Bucket, Buckets
from varlen.execution.cuda.graphs import CudaGraphs, Graphs, Replay, capture_each
from varlen.execution.packing import InputLayout
from varlen.execution.step_packing import StepArrays, step_arrays
from varlen.scheduling.sequence import Chunk

# Its length depends on contexts. It is last in the buffer, so that only what is used of it is copied.
_TABLES = "block_ids"
# The slot of a token that is written nowhere.
_NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graph of steps of up to these dimensions.

    Attributes:
        inputs: its inputs on the host, by name.
        bytes_before_tables: bytes of all inputs but the block tables.
        replay: starts it.
    """

    inputs: Mapping[str, npt.NDArray[Any]]
    bytes_before_tables: int
    replay: Replay


class CudaSteps:
    """Runs a program's steps on a GPU. Not for two threads at once.

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
    ) -> None:
        """Capture a graph for each size of step.

        Args:
            bound: the program of a step.
            blocks_per_sequence: blocks of the longest sequence.
            blocks_per_source: blocks of the longest source text.
            graphs: captures them; None is this device's own.
        """
        program, arena = bound.program, bound.arena
        self._bound = bound
        self._blocks_per_sequence = blocks_per_sequence
        self._blocks_per_source = blocks_per_source
        self._graphs = graphs or CudaGraphs(arena.device)
        # tables last
        self._declared = sorted(program.inputs, key=lambda value: value.name == _TABLES)
        rows, tokens = arena.largest["logit_rows"], arena.largest["tokens"]
        most = {"tokens": tokens, "sequences": rows, "logit_rows": rows}
        # a step of prompts has tables for each of its tokens
        blocks = {"blocks": rows * blocks_per_sequence, "source_blocks": tokens * blocks_per_source}
        size = InputLayout.of(self._declared, {**most, **blocks}).num_bytes
        pinned = arena.device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=arena.device)
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
        logits waits here, so the next one may overwrite the inputs on the host.
        """
        arrays = step_arrays(chunks, self._bound.block_size)
        tokens, logit_rows = len(arrays["token_ids"]), len(arrays["logit_rows"])
        captured = self._captured[self._bucket(tokens, max(len(chunks), logit_rows))]
        self._copy(arrays, captured)
        captured.replay()
        if not logit_rows:
            self._graphs.record()()
        return self._logits[:logit_rows]

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
        # inputs of zeros, but no slot: tokens of no sequence, which write nothing
        self._device.zero_()
        layout = InputLayout.of(self._declared, dims)
        inputs = layout.views(self._device)
        inputs["slots"].fill_(_NO_SLOT)
        logits = [self._logits[: bucket.sequences]]
        replay = self._graphs.capture(lambda: self._bound.run(inputs, dims, logits))
        on_host = {name: view.numpy() for name, view in layout.views(self._host).items()}
        *_, (_, _, tables) = layout.places
        return _Captured(on_host, tables.start, replay)

    def _copy(self, arrays: StepArrays, captured: _Captured) -> None:
        """Copy the inputs of a step to the device.

        Places that are left belong to no token and to no sequence.
        """
        for name, into in captured.inputs.items():
            used = len(arrays[name])
            into[:used] = arrays[name]
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
        num_bytes = captured.bytes_before_tables + arrays[_TABLES].nbytes
        self._graphs.copy(self._device[:num_bytes], self._host[:num_bytes])


def _decode_sizes(most: int) -> list[int]:
    """Return the numbers of sequences that have a graph, ascending."""
    return [*(size for size in (1, 2, 4) if size < most), *range(8, most, 8), most]
