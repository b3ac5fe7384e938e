"""Models as the calibration of int8 runs them.

An encoder answers a text with a vector, a model that generates with the logits of each token. Its steps run
with small KV caches: a prompt is one step. Where an encoder reads source texts, the targets are what the model itself
makes of them in fp32, by greedy search.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from varlen.execution.arenas import KvSize, caches_of, new_caches
from varlen.execution.cpu.runner import CpuRunner, tensors_of
from varlen.execution.int8.calibration import (
    LogitQuality,
    VectorQuality,
    compare_logits,
    compare_vectors,
)
from varlen.execution.packing import (
    dims_of,
    largest_dims,
    prompt_arrays,
    source_arrays,
    source_dims,
    step_arrays,
    step_dims,
)
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.planner import Layout
from varlen.models.blocks.heads import record_head
from varlen.models.checkpoint.generation_config import TargetTokens
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.registry import EncoderModel
from varlen.program.program import PackedBatch, Program
from varlen.program.recorder import Recorder
from varlen.request.generation import GenerationOptions
from varlen.request.request import (
    DEFAULT_OPTIONS,
    Float32Array,
    Int32Array,
    Prompt,
    Request,
    RequestOptions,
    Source,
)
from varlen.scheduling.batch import Chunk
from varlen.scheduling.sequence import GeneratedSequence, unanswered_sequences
from varlen_kernels import cpu

_CPU = torch.device("cpu")
# Longest text and longest target, in tokens; texts that are translated together.
_LONGEST = 64
_LONGEST_TARGET = 32
_TOGETHER = 48
# Logits that are held at a time, of each of both models: 64 MiB.
_MOST_LOGITS = 2**24
# Logits of a batch that calibrates: 1 GiB.
_MOST_SEEN_LOGITS = 2**28
# Tokens of a block; blocks of a text, and of its source.
_BLOCK_TOKENS = 16
_BLOCKS = _LONGEST // _BLOCK_TOKENS

# KV caches that hold the texts of a step.
CALIBRATION_KV = KvSize(2 * _BLOCKS * _TOGETHER, _BLOCK_TOKENS, 0, torch.float32)
_OPTIONS = RequestOptions(generation=GenerationOptions())


class CalibratedDecoder:
    """A model that generates, with logits of each token; see `CalibratedModel`."""

    name: str

    def __init__(self, programs: Sequence[Program], checkpoint: Checkpoint) -> None:
        """Keep the programs of a model.

        Args:
            programs: programs of `record_steps` in fp32 on the CPU, with `CALIBRATION_KV`.
        """
        self.programs: tuple[Program, ...] = tuple(programs)
        self.checkpoint = checkpoint
        self.name = "decoder" if checkpoint.translate is None else "encoder and decoder"
        self.longest = min(checkpoint.max_sequence_tokens, _LONGEST)
        self.most_texts = _TOGETHER
        self.seen_tokens = min(_LONGEST * _TOGETHER, _MOST_SEEN_LOGITS // checkpoint.vocab_size)
        self.measured_tokens = _MOST_LOGITS // checkpoint.vocab_size

    def prompts(self, texts: Sequence[Int32Array]) -> list[Prompt]:
        if self.checkpoint.translate is None:
            return [Prompt(text) for text in texts]
        steps, tokens = _Steps(self.programs, cpu, _TOGETHER), self.checkpoint.translate.tokens
        length = min(self.longest, _LONGEST_TARGET)
        return [
            prompt
            for first in range(0, len(texts), _TOGETHER)
            for prompt in _translate(steps, texts[first : first + _TOGETHER], tokens, length)
        ]

    def run(
        self, programs: Sequence[Program], kernels: object, prompts: Sequence[Prompt]
    ) -> Iterator[Tensor]:
        """Yield the logits of each prompt, `[tokens, vocabulary]`; see `CalibratedModel`."""
        chunks = [
            _chunk(prompt, 0, prompt.token_ids, place, encodes=True)
            for place, prompt in enumerate(prompts)
        ]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        logits = _Steps(programs, kernels, sum(lengths)).logits(chunks)
        yield from torch.split(logits, lengths)

    def compare(
        self, answers: Iterator[Tensor], expected: Iterator[Tensor], prompts: Sequence[Prompt]
    ) -> LogitQuality:
        token_ids = (torch.from_numpy(prompt.token_ids) for prompt in prompts)
        return compare_logits(zip(answers, expected, token_ids, strict=True))


class _Steps:
    """Runs steps of up to `_TOGETHER` texts."""

    def __init__(self, programs: Sequence[Program], kernels: object, logit_rows: int) -> None:
        caches = caches_of(programs[0].states, new_caches(programs[0].states, _CPU))
        # the sources of a step are encoded together
        tokens = _LONGEST * _TOGETHER if len(programs) > 1 else logit_rows
        largest = {"tokens": tokens, "sequences": _TOGETHER, "logit_rows": logit_rows}
        arenas = [
            Arena(Layout(program.buffers, alignment_of(_CPU)), largest, _CPU)
            for program in programs
        ]
        self._decoder, *self._encoders = [
            CpuRunner(program, kernels, arena, caches, of_steps=True)
            for program, arena in zip(programs, arenas, strict=True)
        ]

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of all tokens of a step, `[tokens, vocabulary]`."""
        sources = source_arrays(chunks, _BLOCK_TOKENS)
        for encoder in self._encoders if sources else ():
            encoder.run(sources, source_dims(sources), [])
        inputs = dict(step_arrays(chunks, _BLOCK_TOKENS))
        inputs["logit_rows"] = np.arange(len(inputs["token_ids"]), dtype=np.int32)
        (logits,) = self._decoder.run(inputs, step_dims(inputs))
        return logits


def _translate(
    steps: _Steps, sources: Sequence[Int32Array], tokens: TargetTokens, length: int
) -> list[Prompt]:
    """Return source texts with their most probable targets of this length, token by token."""
    start = np.array([tokens.start], np.int32)
    prompts = [Prompt(start, payload=Source(source)) for source in sources]
    targets = np.full((len(prompts), length), tokens.start, np.int32)
    for position in range(length):
        chunks = [
            _chunk(prompt, position, target[position : position + 1], place, encodes=not position)
            for place, (prompt, target) in enumerate(zip(prompts, targets, strict=True))
        ]
        logits = steps.logits(chunks)
        is_forced = position == 0 and tokens.forced_first is not None
        if position + 1 < length:
            targets[:, position + 1] = tokens.forced_first if is_forced else logits.argmax(1)
    return [
        Prompt(_cut(target, tokens.eos), payload=prompt.payload)
        for prompt, target in zip(prompts, targets, strict=True)
    ]


def _cut(target: Int32Array, eos: Sequence[int]) -> Int32Array:
    """Return a target up to its first end token; the start may be one."""
    ends = np.flatnonzero(np.isin(target[1:], eos))
    return target[: ends[0] + 2] if len(ends) else target


def _chunk(
    prompt: Prompt, start: int, token_ids: Int32Array, place: int, *, encodes: bool
) -> Chunk:
    """Return tokens of a prompt as a chunk.

    Args:
        place: number of the prompt in the step.
        encodes: whether its source is encoded before.
    """
    (sequence,) = unanswered_sequences(Request((prompt,), _OPTIONS))
    assert isinstance(sequence, GeneratedSequence)
    blocks = range(2 * _BLOCKS * place, 2 * _BLOCKS * (place + 1))
    held = -(-(start + len(token_ids)) // _BLOCK_TOKENS)
    own, sources = array("i", blocks[:held]), tuple(blocks[_BLOCKS:])
    chunk = Chunk(sequence, start, tuple(token_ids.tolist()), own, ())
    source_ids = prompt.payload_tokens(Source)
    if source_ids is None:
        return chunk
    source = tuple(source_ids.tolist())
    return chunk._replace(source_block_ids=sources, encodes=source if encodes else ())


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
