"""What a loaded model of any family can do: an encoder, a decoder, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from varlen.models.blocks.attention import Attention, CrossAttention
    from varlen.models.blocks.heads import Heads
    from varlen.models.checkpoint.layers import TokenTable
    from varlen.program.program import Value
    from varlen.program.rank import AttentionHeads
    from varlen.program.recorder import Recorder


class EncoderModel(Protocol):
    """A loaded encoder of any family."""

    @property
    def type_vocab_size(self) -> int:
        """Token types below this are valid."""

    @property
    def token_table(self) -> TokenTable:
        """The embedding of each token."""

    @property
    def heads(self) -> Heads:
        """The layers on top of it."""

    def record(self, ops: Recorder) -> Value:
        """Record the encoder and return its last hidden state, `[tokens, hidden]`."""


class DecoderModel(Protocol):
    """A loaded decoder of any family."""

    @property
    def layers(self) -> Sequence[object]:
        """Its layers, each with an attention."""

    @property
    def attention_heads(self) -> AttentionHeads:
        """Heads of each of these layers."""

    @property
    def token_table(self) -> TokenTable:
        """The embedding of each token."""

    @property
    def heads(self) -> Heads:
        """The layers on top of it, for tasks of one step."""

    def record(self, ops: Recorder, attention: Attention) -> Value:
        """Record the decoder and return its last hidden state after the final norm, `[tokens, hidden]`."""

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""


@runtime_checkable
class EncoderDecoderModel(Protocol):
    """A loaded model with an encoder and a decoder, of any family."""

    @property
    def layers(self) -> Sequence[object]:
        """The layers of the decoder."""

    @property
    def attention_heads(self) -> AttentionHeads:
        """Heads of each of these layers, in self-attention and in cross-attention."""

    @property
    def token_table(self) -> TokenTable:
        """The embedding of each token of targets."""

    def record_encoder(self, ops: Recorder, cross: CrossAttention) -> None:
        """Record the encoder, and storing its keys and values for each layer of the decoder."""

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        """Record the decoder and return its last hidden state, `[tokens, hidden]`."""

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""
