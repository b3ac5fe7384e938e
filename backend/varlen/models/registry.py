"""The loader of each model family, by the `model_type` of config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from varlen.models import bart_checkpoint, llama_checkpoint, t5_checkpoint
from varlen.models.bart import load_bart
from varlen.models.blocks.attention import Attention, CrossAttention, PackedAttention
from varlen.models.blocks.heads import Heads, head_dtype
from varlen.models.blocks.masked_lm import load_masked_lm
from varlen.models.blocks.score_head import load_score
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.deberta import Deberta, load_deberta
from varlen.models.gpt2 import load_gpt2
from varlen.models.llama import load_llama
from varlen.models.modernbert import ModernBert, load_modernbert
from varlen.models.post_norm import PostNormEncoder, load_post_norm
from varlen.models.post_norm_families import POST_NORM_FAMILIES
from varlen.models.t5 import load_t5, load_t5_encoder
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder
from varlen.tasks import TASKS, Task


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
    """A loaded decoder of any family."""

    @property
    def num_layers(self) -> int:
        """Number of its attention layers."""

    @property
    def attention_heads(self) -> AttentionHeads:
        """Heads of each of these layers."""

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""

    def record(self, ops: Recorder, attention: Attention) -> Value:
        """Record the decoder and return its last hidden state after the final norm, `[tokens, hidden]`."""

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""


@runtime_checkable
class EncoderDecoderModel(Protocol):
    """A loaded model with an encoder and a decoder, of any family."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the decoder."""

    @property
    def attention_heads(self) -> AttentionHeads:
        """Heads of each of these layers, in self-attention and in cross-attention."""

    @property
    def vocab_size(self) -> int:
        """Token ids of targets below this are valid."""

    def record_encoder(self, ops: Recorder, cross: CrossAttention) -> None:
        """Record the encoder, and storing its keys and values for each layer of the decoder."""

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        """Record the decoder and return its last hidden state, `[tokens, hidden]`."""

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""


# By the `model_type` of config.json; `Checkpoint.open` refuses all others.
_ENCODERS: Mapping[str, Callable[[Checkpoint, torch.dtype, torch.device], EncoderModel]] = {
    **dict.fromkeys(POST_NORM_FAMILIES, load_post_norm),
    "modernbert": load_modernbert,
    "deberta-v2": load_deberta,
    **dict.fromkeys(t5_checkpoint.FAMILIES, load_t5_encoder),
}
_DECODERS: Mapping[
    str, Callable[[Checkpoint, torch.dtype, torch.device, torch.dtype], DecoderModel]
] = {
    "gpt2": load_gpt2,
    **dict.fromkeys(llama_checkpoint.FAMILIES, load_llama),
}
_ENCODER_DECODERS: Mapping[
    str, Callable[[Checkpoint, torch.dtype, torch.device], EncoderDecoderModel]
] = {
    **dict.fromkeys(bart_checkpoint.FAMILIES, load_bart),
    **dict.fromkeys(t5_checkpoint.FAMILIES, load_t5),
}


@dataclass(frozen=True, slots=True)
class OneStepDecoder:
    """A decoder that reads whole sequences in one step.

    Attributes:
        decoder: the decoder.
        heads: the layers on top of it.
    """

    decoder: DecoderModel
    heads: Heads

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        return self.decoder.vocab_size

    @property
    def type_vocab_size(self) -> int:
        """Token types below this are valid: decoders have one."""
        return 1

    def record(self, ops: Recorder) -> Value:
        """Record the decoder and return its last hidden state after the final norm, `[tokens, hidden]`."""
        return self.decoder.record(ops, PackedAttention())


def load_encoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> EncoderModel:
    """Return the model of a checkpoint in `dtype` on `device`, for tasks of one step.

    Raises:
        CheckpointError: its weights do not fit its config.json.
    """
    if checkpoint.is_decoder:
        load = _DECODERS[checkpoint.config["model_type"]]
        decoder = load(checkpoint, dtype, device, head_dtype(checkpoint, dtype))
        return OneStepDecoder(decoder, load_score(checkpoint, device))
    return _ENCODERS[checkpoint.config["model_type"]](checkpoint, dtype, device)


def load_heads(
    checkpoint: Checkpoint,
    encoder: EncoderModel,
    task: Task,
    dtype: torch.dtype,
    device: torch.device,
) -> Heads:
    """Return the layers on top of an encoder that a task needs.

    Raises:
        CheckpointError: its weights do not fit its config.json.
    """
    if not TASKS[task].needs_masked_lm:
        return encoder.heads
    # Checkpoint.check_task has refused other models
    assert isinstance(encoder, PostNormEncoder | ModernBert | Deberta)
    assert checkpoint.masked_lm is not None
    return Heads(
        masked_lm=load_masked_lm(
            checkpoint.folder, checkpoint.masked_lm, encoder.token_table, dtype, device
        )
    )


def load_decoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """Return the decoder of a checkpoint, whose `is_decoder` is true, in `dtype` on `device`.

    Raises:
        CheckpointError: its weights do not fit its config.json.
    """
    return _DECODERS[checkpoint.config["model_type"]](checkpoint, dtype, device, dtype)


def load_encoder_decoder(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> EncoderDecoderModel:
    """Return the model of a checkpoint, whose `translate` is not None, in `dtype` on `device`.

    Raises:
        CheckpointError: its weights do not fit its config.json.
    """
    return _ENCODER_DECODERS[checkpoint.config["model_type"]](checkpoint, dtype, device)
