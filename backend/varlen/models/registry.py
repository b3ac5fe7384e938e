"""The families that are served, by `model_type`, and what their models can do.

Names of tensors and fields are the ones that Hugging Face transformers saves, unless a family's file says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from varlen.errors import CheckpointError
from varlen.models import (
    bart,
    bert_relatives,
    deberta,
    gemma,
    gpt2,
    llama,
    llama_relatives,
    modernbert,
    static,
    t5,
)
from varlen.models.checkpoint.family import Family
from varlen.models.checkpoint.files import Json, show
from varlen.models.static import STATIC

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


ENCODERS: Mapping[str, Family[EncoderModel]] = {
    **{name: each.family for name, each in bert_relatives.RELATIVES.items()},
    "modernbert": modernbert.FAMILY,
    "deberta": deberta.FIRST_FAMILY,
    "deberta-v2": deberta.FAMILY,
}
DECODERS: Mapping[str, Family[DecoderModel]] = {
    "gpt2": gpt2.FAMILY,
    **llama.FAMILIES,
    **gemma.FAMILIES,
    **llama_relatives.FAMILIES,
}
ENCODER_DECODERS: Mapping[str, Family[EncoderDecoderModel]] = {
    **bart.FAMILIES,
    **t5.FAMILIES,
    **gemma.ENCODER_DECODERS,
}
# By the beginning of their architecture, encoders that share a `model_type` with another family.
ENCODERS_BY_NAME: Mapping[str, Family[EncoderModel]] = {
    **t5.ENCODERS,
    **bert_relatives.RELATIVES_BY_NAME,
}

FAMILIES: Mapping[str, Family[object]] = {**ENCODERS, **DECODERS, **ENCODER_DECODERS}

# What makes config.json of the text part of a multimodal model, by its `model_type`.
TEXT_PARTS: Mapping[str, Callable[[Json], Json]] = {"gemma3": gemma.text_part}


def text_part(config: Json) -> Json:
    """Return config.json of the text part of a multimodal model, else unchanged.

    Raises:
        CheckpointError: its text part is not served.
    """
    name = config.get("model_type")
    part = TEXT_PARTS.get(name) if isinstance(name, str) else None
    return config if part is None else part(config)


def family_of(config: Json) -> Family[object]:
    """Return the family of a config.json; raise CheckpointError if none has its `model_type`."""
    name, architectures = config.get("model_type"), config.get("architectures")
    if name is None:
        raise CheckpointError(
            "config.json has no model_type, which names the architecture in a checkpoint of transformers; copy"
            f" config.json of the model that it was made of. This version serves: {', '.join([*FAMILIES, *TEXT_PARTS])}"
        )
    if name == STATIC:
        # no config.json of a library has this name
        return static.FAMILY
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"config.json has model_type {show(name)}; this version serves: {', '.join([*FAMILIES, *TEXT_PARTS])}"
        )
    first = str(first_name(architectures))
    own = (family for start, family in ENCODERS_BY_NAME.items() if first.startswith(start))
    return next(own, FAMILIES[name])


def first_name(names: object) -> object:
    """Return the first of several names in config.json, or a value that is no list."""
    return names[0] if isinstance(names, list) and names else names
