"""The loader of each model family, by the `model_type` of config.json."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from varlen.models.attention import Attention
from varlen.models.bert import load_bert
from varlen.models.checkpoint import Checkpoint
from varlen.models.heads import Heads
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder


class EncoderModel(Protocol):
    """A loaded encoder of any family."""

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""

    @property
    def type_vocab_size(self) -> int:
        """Token types below this are valid."""

    @property
    def heads(self) -> Heads:
        """The layers on top of it."""

    def record(self, ops: Recorder) -> Value:
        """Record the encoder and return its last hidden state, `[tokens, hidden]`."""


class DecoderModel(Protocol):
    """A loaded decoder of any family.

    Attributes:
        num_layers: number of its attention layers.
        attention_heads: of each of these layers.
    """

    num_layers: int
    attention_heads: AttentionHeads

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""

    def record(self, ops: Recorder, attention: Attention) -> Value:
        """Record the decoder and return its last hidden state after the final norm, `[tokens, hidden]`."""

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""


Load: TypeAlias = Callable[[Checkpoint, torch.dtype, torch.device], EncoderModel]

# `Checkpoint.open` refuses all other families.
FAMILIES: dict[str, Load] = {"bert": load_bert}


def load_encoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> EncoderModel:
    """Return the encoder of a checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: its weights do not fit its config.json.
    """
    return FAMILIES[checkpoint.config["model_type"]](checkpoint, dtype, device)
