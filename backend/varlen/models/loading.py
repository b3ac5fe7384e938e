"""Loads the model of a checkpoint: an encoder with its head, a decoder, or both."""

from dataclasses import dataclass
from typing import Any

import torch

from varlen.errors import ConfigError
from varlen.models.blocks.attention import PackedAttention
from varlen.models.blocks.extraction import load_extraction
from varlen.models.blocks.heads import Heads, load_masked_lm
from varlen.models.checkpoint.layers import LayerReader, StageLayers, TokenTable
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint, encoder_head
from varlen.models.registry import (
    FAMILIES,
    DecoderModel,
    EncoderDecoderModel,
    EncoderModel,
    family_of,
)
from varlen.program.program import Value
from varlen.program.rank import ALONE, Rank
from varlen.program.recorder import Recorder
from varlen.tasks import TASKS, Task


@dataclass(frozen=True, slots=True)
class OneStepDecoder:
    """A decoder that reads whole sequences in one step."""

    decoder: DecoderModel
    is_causal: bool

    @property
    def type_vocab_size(self) -> int:
        return 1

    @property
    def token_table(self) -> TokenTable:
        return self.decoder.token_table

    @property
    def heads(self) -> Heads:
        return self.decoder.heads

    def record(self, ops: Recorder) -> Value:
        return self.decoder.record(ops, PackedAttention(self.is_causal))


def load_encoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank = ALONE,
    stage: StageLayers | None = None,
    *,
    keeps_codes: bool = False,
) -> EncoderModel:
    """Return the model of a checkpoint, or a part, for tasks of one step.

    The last norm and a classifier are fp32. In half precision, logits of many documents would be equal; see
    docs/decisions/0039-scores-in-fp32.md. `load_decoder` says what `keeps_codes` is.

    Raises:
        CheckpointError: its weights do not fit its config.json.
    """
    has_scores = checkpoint.num_labels or checkpoint.extraction is not None
    last_dtype = torch.float32 if has_scores else dtype
    model = _load(checkpoint, dtype, device, last_dtype, rank, stage, keeps_codes=keeps_codes)
    encoder: EncoderModel = (
        OneStepDecoder(model, checkpoint.is_causal) if checkpoint.is_decoder else model
    )
    return encoder


def load_heads(
    checkpoint: Checkpoint,
    encoder: EncoderModel,
    task: Task,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank = ALONE,
) -> Heads:
    """Return the layers on top of an encoder that a task needs.

    Raises:
        CheckpointError: its weights do not fit its config.json.
        ConfigError: ranks cannot divide them.
    """
    has_layers = task == "sparse_embed" and bool(checkpoint.vector_layers(task))
    if has_layers or (not TASKS[task].needs_masked_lm and task != "extract"):
        return encoder.heads
    if rank != ALONE:
        raise ConfigError(
            f'tensor_parallel is {rank.size}; allowed for the task "{task}": 1, since its answers need the logits of'
            " all tokens"
        )
    # Checkpoint.check_task has refused other models
    with CheckpointWeights(checkpoint.weights_folder, checkpoint.adapter) as weights:
        if task == "extract":
            assert checkpoint.extraction is not None
            exact = LayerReader(weights, torch.float32, device)
            labels = _load_label_encoder(checkpoint, dtype, device)
            return Heads(extraction=load_extraction(exact, checkpoint.extraction, labels))
        assert checkpoint.masked_lm is not None
        read = LayerReader(weights, dtype, device)
        return Heads(masked_lm=load_masked_lm(read, checkpoint.masked_lm, encoder.token_table))


def _load_label_encoder(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> EncoderModel | None:
    """Return the encoder of labels; its last norm is fp32."""
    assert checkpoint.extraction is not None
    if checkpoint.extraction.labels is None:
        return None
    config = checkpoint.extraction.labels.config
    with CheckpointWeights(checkpoint.weights_folder, of_labels=True) as weights:
        read = LayerReader(weights, dtype, device, torch.float32)
        model: Any = family_of(config).load(read, config, encoder_head(config))
    encoder: EncoderModel = model
    return encoder


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank = ALONE,
    stage: StageLayers | None = None,
    *,
    keeps_codes: bool = False,
) -> DecoderModel | EncoderDecoderModel:
    """Return the decoder of a checkpoint, and its encoder if it has one, or parts.

    Args:
        keeps_codes: whether linear layers keep the codes of quantized weights.

    Raises:
        CheckpointError: its weights do not fit its config.json.
        ConfigError: ranks cannot divide it.
    """
    by_output = is_by_output(device)
    model: DecoderModel | EncoderDecoderModel = _load(
        checkpoint, dtype, device, dtype, rank, stage, by_output=by_output, keeps_codes=keeps_codes
    )
    return model


def is_by_output(device: torch.device) -> bool:
    """Return whether the inputs of an output lie side by side in a decoder's weights."""
    return device.type == "cuda"


def _load(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    last_dtype: torch.dtype,
    rank: Rank,
    stage: StageLayers | None,
    *,
    by_output: bool = False,
    keeps_codes: bool = False,
) -> Any:
    if (rank != ALONE or stage is not None) and not checkpoint.family.is_divisible:
        names = sorted(name for name, family in FAMILIES.items() if family.is_divisible)
        setting = (
            "pipeline_parallel is above 1" if rank == ALONE else f"tensor_parallel is {rank.size}"
        )
        raise ConfigError(
            f"{setting}; a {checkpoint.architecture} runs in one process; allowed are most classes of"
            f" {', '.join(names)}"
        )
    with CheckpointWeights(checkpoint.weights_folder, checkpoint.adapter) as weights:
        read = LayerReader(weights, dtype, device, last_dtype, rank, stage)
        read.by_output, read.keeps_codes = by_output, keeps_codes
        return checkpoint.family.load(read, checkpoint.config, checkpoint.head)
