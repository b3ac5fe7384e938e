"""What the engine knows of a loaded model; its workers may run in other processes."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from varlen.costs.batch_shape import BatchShape
from varlen.request.request import MAX_MASKS, Masks
from varlen.tasks import Task
from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model.

    Attributes:
        task: the task of the model.
        device: kind of the device that runs it: cpu or cuda.
        device_name: name of the device, for the log.
        dtype: data type of weights and activations.
        vocab_size, type_vocab_size: ids below these are valid.
        max_sequence_tokens: longest sequence, in tokens.
        max_batch_tokens: largest batch of several sequences of a worker, in tokens, padding included.
        max_arena_tokens: longest sequence that the arena of a worker holds, in tokens.
        weight_bytes: memory of the weights, in bytes; workers share it.
        arena_bytes: largest memory of intermediates, in bytes, of one worker.
        is_padded: whether sequences are padded to the longest of their batch, for comparison.
        workers: number of batches that run at the same time.
        cost_fields: fields that decide the run time of batches beside settings.
    """

    task: Task
    device: str
    device_name: str
    dtype: str
    vocab_size: int
    type_vocab_size: int
    max_sequence_tokens: int
    max_batch_tokens: int
    max_arena_tokens: int
    weight_bytes: int
    arena_bytes: int
    is_padded: bool
    workers: int
    cost_fields: Mapping[str, str]

    def padding_tokens(self, shape: BatchShape) -> int:
        """Return the number of padding tokens of a batch of this shape."""
        return shape.sequences * shape.longest - shape.tokens if self.is_padded else 0

    def most_masks(self, length: int) -> Masks:
        """Return the most masks of a prompt of this length."""
        count = min(length, MAX_MASKS) if self.task == "fill_mask" else 0
        return Masks(np.arange(count, dtype=np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A loaded model that generates.

    Attributes:
        device: kind of the device that runs it: cpu or cuda.
        device_name: name of the device, for the log.
        dtype: data type of weights and activations.
        vocab_size: token ids are below this.
        has_sources: whether each sequence has a source text, which an encoder reads.
        max_sequence_tokens: longest sequence, prompt and answer together, in tokens.
        max_step_tokens: largest step, in tokens.
        max_logit_rows: most rows of logits of a step.
        weight_bytes: memory of the weights, in bytes.
        arena_bytes: largest memory of intermediates, in bytes.
        num_blocks: number of KV blocks.
        block_size: tokens of a KV block.
        block_bytes: memory of a KV block in all layers, in bytes.
    """

    device: str
    device_name: str
    dtype: str
    vocab_size: int
    has_sources: bool
    max_sequence_tokens: int
    max_step_tokens: int
    max_logit_rows: int
    weight_bytes: int
    arena_bytes: int
    num_blocks: int
    block_size: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class GraphUse:
    """What the captured CUDA graphs of a model cost.

    Attributes:
        count: number of graphs.
        num_bytes: device memory that they took, in bytes, with kernels and workspaces loaded for them.
        seconds: time that the captures took.
    """

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def metrics(self) -> MetricsSnapshot:
        """Return the gauges of it."""
        return {
            SnapshotMetric.GRAPHS: self.count,
            SnapshotMetric.GRAPH_BYTES: self.num_bytes,
            SnapshotMetric.GRAPH_SECONDS: self.seconds,
        }
