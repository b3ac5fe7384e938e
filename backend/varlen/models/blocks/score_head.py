"""The classifier on a decoder: one linear layer, or the difference of two logits.

Source of the names: decoders as saved by Hugging Face transformers.
"""

from dataclasses import replace
from typing import Literal

from varlen.models.blocks.heads import Heads
from varlen.models.checkpoint.family import HeadConfig
from varlen.models.checkpoint.layers import LayerReader, Linear
from varlen.models.checkpoint.logit_score import LogitScore


def read_score(
    read: LayerReader,
    head: HeadConfig,
    hidden: int,
    *,
    pooling: Literal["cls", "mean", "last"] = "last",
    temperature: float = 1.0,
) -> Heads:
    """Return the classifier of a checkpoint in fp32, none if its architecture has none.

    Args:
        pooling: pooling of a sequence into the row that it reads.
        temperature: divides its outputs.
    """
    if head.task not in ("classify", "token_classify"):
        return Heads()
    has_bias = head.task == "token_classify"
    layer = read.fp32.linear(["score"], hidden, [head.num_labels], bias=has_bias)
    if temperature != 1.0:
        layer = read.computed(lambda: replace(layer, weight=layer.weight / temperature))
    return Heads(pooling=pooling, classifier=layer)


def read_logit_score(read: LayerReader, score: LogitScore, name: str, *shape: int) -> Heads:
    """Return the layer whose output is the difference of two logits of the last token.

    Args:
        score: has the two tokens.
        shape: vocabulary and hidden features.
    """
    tokens = [each for each in (score.true_token, score.false_token) if each is not None]
    rows = read.fp32.rows(name, *shape, of=tokens)

    def layer() -> Linear:
        row = rows[0] - rows[1] if len(tokens) > 1 else rows[0]
        return Linear(row.reshape(-1, 1).clone(), None)

    return Heads(pooling="last", classifier=read.computed(layer))
