"""Encoders of the report: random checkpoints, and the batches that they run."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from varlen.config import DType, EngineConfig
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.model_state import OneShot
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array, Prompt, RequestOptions
from varlen_bench.kernels.encoder import random_prompts
from varlen_bench.kernels.grid import FULL
from varlen_bench.peers.checkpoints import BERT_BASE, MINILM, EncoderShape


@dataclass(frozen=True, slots=True)
class EncoderGrid:
    """What a stage runs on encoders.

    Attributes:
        shapes: the encoders.
        batches: lengths of the sequences of each batch, by name.
        dtype: dtype of the weights.
        max_tokens: tokens of the largest batch.
        max_length: tokens of the longest sequence.
    """

    shapes: tuple[EncoderShape, ...]
    batches: dict[str, list[int]]
    dtype: DType = "bf16"
    max_tokens: int = 8192
    max_length: int = 512


SERVED = EncoderGrid(
    (MINILM, BERT_BASE),
    {
        "1x20": [20],
        "8x20": [20] * 8,
        "64x13": [13] * 64,
        "16x250": [250] * 16,
        "8192 of 5-500": FULL.serving_lengths(),
    },
)


@contextmanager
def loaded(folder: Path, grid: EncoderGrid) -> Iterator[OneShot]:
    """Yield the executor of a checkpoint on the GPU."""
    config = EngineConfig(
        device="cuda",
        dtype=grid.dtype,
        max_batch_tokens=grid.max_tokens,
        max_sequence_tokens=grid.max_length,
    )
    with closing(Runner(Checkpoint.open(folder), config)) as runner:
        assert isinstance(runner.state, OneShot)
        yield runner.state


def graphs_of(state: OneShot) -> CudaRunner:
    """Return the graphs of an executor on the GPU."""
    assert isinstance(state.device, CudaRunner)
    return state.device


def random_batch(
    lengths: list[int], vocabulary: int, seed: int = 0
) -> tuple[list[Prompt], list[RequestOptions]]:
    """Return prompts of random ids; every second vector is normalized."""
    options = [RequestOptions(normalize=index % 2 == 0) for index in range(len(lengths))]
    return random_prompts(lengths, vocabulary, seed), options


def differs(answers: list[Float32Array], expected: list[Float32Array]) -> bool:
    """Return whether any bit of an answer differs."""
    return not all(map(np.array_equal, answers, expected))
