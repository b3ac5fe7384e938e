"""Runs the steps of generation on a CUDA GPU.

The ops of a decode step are shorter on the GPU than the Python that launches them, so it replays a graph. Its shape has
one degree of freedom, the number of sequences, and a graph for each of a few sizes serves all of them. A step with a
chunk of a prompt has longer ops and any shape; it runs op by op.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.execution.bound_program import BoundProgram
from varlen.execution.cuda.graphs import CudaGraphs, Graphs, Replay, capture_each
from varlen.execution.packing import InputLayout
from varlen.execution.step_packing import step_dims, step_inputs
from varlen.memory.usage import Dims
from varlen.scheduling.sequence import Chunk

# Their lengths depend on contexts. The longer one is last in the buffer, so that only what is used is copied.
_TABLES = "block_ids"
_SOURCE_TABLES = "source_block_ids"


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graph of decode steps of up to this number of sequences."""

    dims: Dims
    layout: InputLayout
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
        """Capture a graph for each size of decode step.

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
        with torch.inference_mode():
            self._captured, self.graph_use = capture_each(
                self._graphs, _graph_sizes(rows), self._capture
            )

    def stream(self) -> AbstractContextManager[object]:
        """Return the context that makes the stream, and its device, current."""
        return self._graphs.stream()

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one.

        Called in the context of `stream`. The caller reads the logits back, which waits for the device; a step without
        logits waits here, so the next one may overwrite the inputs on the host.
        """
        arrays = step_inputs(chunks, self._bound.block_size)
        dims = step_dims(arrays)
        if all(len(chunk.token_ids) == len(chunk.samples) == 1 for chunk in chunks):
            captured = self._captured_for(len(chunks))
            # tables last: only what is used of them is copied
            used = InputLayout.of(self._declared, {**captured.dims, "blocks": dims["blocks"]})
            self._copy(_padded(arrays, captured.dims), captured.layout, used.num_bytes)
            captured.replay()
            return self._logits[: len(chunks)]
        layout = InputLayout.of(self._declared, dims)
        self._copy(arrays, layout, layout.num_bytes)
        logits = self._run(layout.views(self._device), dims)
        device = self._bound.arena.device
        if not dims["logit_rows"] and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return logits

    def graph(self, sequences: int) -> Replay:
        """Return what starts the graph of this size, on the inputs of the last step."""
        return self._captured_for(sequences).replay

    def close(self) -> None:
        """Release the graphs."""
        self._captured.clear()
        self._graphs.close()

    def _captured_for(self, sequences: int) -> _Captured:
        return next(each for size, each in self._captured.items() if size >= sequences)

    def _capture(self, count: int) -> _Captured:
        dims = {
            "tokens": count,
            "sequences": count,
            "logit_rows": count,
            "blocks": count * self._blocks_per_sequence,
            "source_blocks": count * self._blocks_per_source,
        }
        # inputs of zeros, but no slot: tokens of no sequence, which write nothing
        self._device.zero_()
        layout = InputLayout.of(self._declared, dims)
        inputs = layout.views(self._device)
        inputs["slots"].fill_(-1)
        return _Captured(dims, layout, self._graphs.capture(lambda: self._run(inputs, dims)))

    def _run(self, inputs: Mapping[str, Tensor], dims: Dims) -> Tensor:
        logits = self._logits[: dims["logit_rows"]]
        self._bound.run(inputs, dims, [logits])
        return logits

    def _copy(self, arrays: Mapping[str, Tensor], layout: InputLayout, num_bytes: int) -> None:
        """Copy the inputs of a step into the first bytes of the device's buffer."""
        for name, view in layout.views(self._host).items():
            view[: len(arrays[name])] = arrays[name]
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)


def _graph_sizes(most: int) -> list[int]:
    """Return the numbers of sequences that have a graph, ascending."""
    return [*(size for size in (1, 2, 4) if size < most), *range(8, most, 8), most]


def _padded(arrays: Mapping[str, Tensor], dims: Dims) -> dict[str, Tensor]:
    """Return the inputs of a decode step, filled up with sequences without context."""
    used, count = len(arrays["context_lens"]), dims["sequences"]
    bounds = torch.arange(count + 1, dtype=torch.int32)
    padded = {
        name: torch.nn.functional.pad(tensor, (0, count - used))
        for name, tensor in arrays.items()
        if name not in (_TABLES, _SOURCE_TABLES, "cu_seqlens", "cu_blocks", "logit_rows", "slots")
    }
    if _SOURCE_TABLES in arrays:
        end = arrays["cu_source_blocks"][-1:].expand(count - used)
        padded["source_rows"] = bounds
        padded["cu_source_blocks"] = torch.cat((arrays["cu_source_blocks"], end))
        padded[_SOURCE_TABLES] = arrays[_SOURCE_TABLES]
    end = arrays["cu_blocks"][-1:].expand(count - used)
    return {
        **padded,
        _TABLES: arrays[_TABLES],
        "slots": torch.nn.functional.pad(arrays["slots"], (0, count - used), value=-1),
        "cu_seqlens": bounds,
        "cu_blocks": torch.cat((arrays["cu_blocks"], end)),
        "logit_rows": bounds[:-1],
    }
