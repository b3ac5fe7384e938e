"""Granite: the layers of Llama, with factors of embeddings, scores, residual sums and logits.

Source: Granite Team 2024, Granite 3.0 Language Models, github.com/ibm-granite/granite-3.0-language-models; tensor and
field names as Hugging Face transformers saves them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from varlen.models import llama
from varlen.models.blocks.feed_forward import Experts, FeedForward
from varlen.models.checkpoint.config_file import Json, read_number
from varlen.models.checkpoint.family import HeadConfig
from varlen.models.checkpoint.layers import Linear

if TYPE_CHECKING:
    from varlen.models.checkpoint.layers import LayerReader

_FIELDS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _read_factors(config: Json) -> tuple[float, ...]:
    """Return the factors of embeddings, scores and residual sums, and the divisor of logits."""
    return tuple(read_number(config, name, default=1.0) for name in _FIELDS)


def _read_sizes(config: Json) -> llama.LlamaConfig:
    _read_factors(config)
    return llama.LlamaConfig.read(config)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> llama.Llama:
    """Return the Granite of a checkpoint; see `Family`.

    Factors that follow a linear layer are in its weights, so no step has an op for them. Where the output layer is the
    table of embeddings, that has the divisor of logits, and the factor of embeddings takes it back.
    """
    config, model = llama.LlamaConfig.read(fields), llama.load(read, fields, head)
    of_embeddings, of_scores, of_sums, divisor = _read_factors(fields)

    def scaled(layer: Linear, factor: float) -> Linear:
        bias = None if layer.bias is None else layer.bias * factor
        return replace(layer, weight=layer.weight * factor, bias=bias)

    def scaled_mlp(mlp: FeedForward | Experts) -> FeedForward:
        assert isinstance(mlp, FeedForward)
        return replace(mlp, down=scaled(mlp.down, of_sums))

    def with_factors() -> llama.Llama:
        layers = tuple(
            replace(
                layer,
                attention_output=scaled(layer.attention_output, of_sums),
                mlp=scaled_mlp(layer.mlp),
            )
            for layer in model.layers
        )
        heads, table, output, of_tokens = (
            model.heads,
            model.token_table,
            model.output,
            of_embeddings,
        )
        if head.logit_score is not None and heads.classifier is not None:
            heads = replace(heads, classifier=scaled(heads.classifier, 1 / divisor))
        if output is not None and config.has_tied_output:
            table = replace(table, weight=table.weight / divisor)
            output, of_tokens = Linear(table.rows.t(), None), of_embeddings * divisor
        elif output is not None:
            output = scaled(output, 1 / divisor)
        return replace(
            model,
            layers=layers,
            token_table=table,
            output=output,
            heads=heads,
            embedding_scale=of_tokens,
            score_scale=of_scores,
        )

    return read.computed(with_factors)


FAMILY = llama.make_family(
    "Granite",
    "granite",
    "GPT2Tokenizer",
    read_sizes=_read_sizes,
    load=load,
    fields=_FIELDS,
    classifiers=(),
)
