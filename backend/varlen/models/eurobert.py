"""EuroBERT: the layers of Llama read as an encoder, with classifiers of its own.

Source: Boizard et al. 2025, arXiv:2503.05500; tensor names as Hugging Face transformers saves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from varlen.models import llama
from varlen.models.blocks.heads import Heads
from varlen.models.checkpoint import kind_fields
from varlen.models.checkpoint.config_file import Json, read_choice
from varlen.models.checkpoint.family import Family, HeadConfig

if TYPE_CHECKING:
    from varlen.models.checkpoint.layers import LayerReader

_Pooling: TypeAlias = Literal["cls", "mean", "late"]
_POOLINGS: Mapping[str, _Pooling] = {"bos": "cls", "mean": "mean", "late": "late"}


def _read_sizes(config: Json) -> llama.LlamaConfig:
    _read_pooling(config)
    return llama.LlamaConfig.read(config)


def _read_pooling(config: Json) -> _Pooling:
    return read_choice(config, "classifier_pooling", _POOLINGS, default="late")


def load(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    """Return the EuroBERT of a checkpoint; see `Family`."""
    model = llama.load(read, fields, replace(head, task="embed"))
    return replace(model, heads=_read_classifier(read.fp32, fields, head))


def _read_classifier(read: LayerReader, fields: Json, head: HeadConfig) -> Heads:
    hidden = llama.LlamaConfig.read(fields).hidden
    if head.task == "token_classify":
        return Heads(classifier=read.linear(["classifier"], hidden, [head.num_labels]))
    if head.task != "classify":
        return Heads()
    pooling = _read_pooling(fields)
    return Heads(
        pooling="mean" if pooling == "late" else pooling,
        dense=read.linear(["dense"], hidden, [hidden]),
        activation="gelu",
        pools_dense=pooling == "late",
        classifier=read.linear(["classifier"], hidden, [head.num_labels]),
    )


FAMILY = Family(
    architectures={
        **dict.fromkeys(("EuroBertModel", "EuroBertForMaskedLM"), "embed"),
        "EuroBertForSequenceClassification": "classify",
        "EuroBertForTokenClassification": "token_classify",
    },
    heads={
        "classify": "EuroBertForSequenceClassification",
        "rerank": "EuroBertForSequenceClassification",
        "token_classify": "EuroBertForTokenClassification",
    },
    fields=kind_fields.DECODER.plus(
        llama.LlamaConfig.names() | llama.OPTIONS["eurobert"].fields,
        # another order of the same sums, and a token of training
        ("mask_token_id", "pretraining_tp"),
        {"hidden_act": "silu", "is_causal": False, "partial_rotary_factor": 1.0},
    ),
    read_sizes=_read_sizes,
    load=load,
    is_unused=lambda name, _: name.startswith("lm_head."),
    tokenizer_class="PreTrainedTokenizerFast",
    kind="decoder",
    is_divisible=True,
    is_causal=lambda _: False,
)
