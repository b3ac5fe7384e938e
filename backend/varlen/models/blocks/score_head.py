"""The layers on a decoder: output layer, classifier, or the difference of two logits.

Source of the names: decoders as saved by Hugging Face transformers.
"""

from dataclasses import replace
from typing import Literal

from varlen.models.blocks.heads import Heads
from varlen.models.blocks.output import read_output
from varlen.models.checkpoint.family import HeadConfig
from varlen.models.checkpoint.layers import LayerReader, Linear, TokenTable
from varlen.models.checkpoint.logit_score import LogitScore


def read_top(
    read: LayerReader,
    head: HeadConfig,
    table: TokenTable,
    hidden: int,
    *,
    is_tied: bool,
    table_name: str,
    output_name: str = "lm_head",
    pooling: Literal["cls", "mean", "last"] = "last",
    temperature: float = 1.0,
) -> tuple[Linear | None, Heads]:
    """Return the output layer and the heads that the architecture of a decoder has.

    Args:
        is_tied: whether config.json ties the output layer and the embedding table.
        pooling, temperature: see `_read_score`.
    """
    shape, output = (table.vocab_size, hidden), None
    if head.architecture.endswith("ForCausalLM"):
        output = read_output(read, table, *shape, is_tied=is_tied, name=output_name)
    if head.logit_score is not None:
        name = table_name if is_tied else f"{output_name}.weight"
        return output, _read_logit_score(read, head.logit_score, name, *shape)
    return output, _read_score(read, head, hidden, pooling, temperature)


def _read_score(
    read: LayerReader,
    head: HeadConfig,
    hidden: int,
    pooling: Literal["cls", "mean", "last"],
    temperature: float,
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


def _read_logit_score(read: LayerReader, score: LogitScore, name: str, *shape: int) -> Heads:
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
