"""An encoder, as the calibration of int8 runs it: a vector for each text."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from varlen.execution.int8.calibration import VectorQuality, compare_vectors
from varlen.execution.packing import dims_of, largest_dims, prompt_arrays, tensors_of
from varlen.memory.arena import Arena, Layout, alignment_of
from varlen.models.blocks.heads import record_head
from varlen.models.blocks.model_types import EncoderModel
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import PackedBatch, Program
from varlen.program.recorder import Recorder
from varlen.request.request import DEFAULT_OPTIONS, Float32Array, Int32Array, Prompt

_CPU = torch.device("cpu")


class CalibratedEncoder:
    """An encoder with one vector per text, whatever the task is; see `CalibratedModel`."""

    name: str = "encoder"
    most_texts = seen_tokens = 8192
    measured_tokens = 2048

    def __init__(self, encoder: EncoderModel, checkpoint: Checkpoint) -> None:
        """Record the encoder.

        Args:
            encoder: encoder in fp32 on the CPU.
        """
        self.checkpoint = checkpoint
        self.longest = checkpoint.max_sequence_tokens
        ops = Recorder()
        hidden = encoder.record(ops)
        head = record_head(ops, "embed", encoder.heads, hidden, checkpoint.pooling)
        self.programs: tuple[Program, ...] = (ops.finish(head),)

    def prompts(self, texts: Sequence[Int32Array]) -> list[Prompt]:
        return [Prompt(text) for text in texts]

    def run(
        self, programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt]
    ) -> Iterator[Float32Array]:
        """Yield the vector of each prompt, `[hidden]`; see `CalibratedModel`."""
        (program,) = programs
        lengths = [prompt.num_tokens for prompt in prompts]
        dims = dims_of(lengths)
        layout = Layout(program.buffers, alignment_of(_CPU))
        arena = Arena(layout, largest_dims(dims["tokens"], len(prompts)), _CPU)
        names = [value.name for value in program.inputs]
        arrays = prompt_arrays(names, prompts, [DEFAULT_OPTIONS] * len(prompts))
        batch = PackedBatch(tensors_of(arrays), dims)
        (output,) = program.run(batch, kernels, arena.allocate(dims))
        yield from output.numpy()

    def compare(
        self,
        answers: Iterator[Float32Array],
        expected: Iterator[Float32Array],
        prompts: Sequence[Prompt],  # noqa: ARG002  # part of the protocol
    ) -> VectorQuality:
        return compare_vectors(np.stack([*answers]), np.stack([*expected]))
