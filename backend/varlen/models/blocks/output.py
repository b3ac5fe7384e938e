"""Embedding tables and output layers, of models that generate or fill masks.

A checkpoint may hold the tables of encoder and decoder and the output matrix once, several times, or as different
tensors. As in transformers 5, each is the tensor of its own name if the checkpoint has it; otherwise it is one of the
tensors that config.json ties it to. A decoder may have a classifier, or the difference of two logits, in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.heads import Heads
from varlen.models.checkpoint.family import HeadConfig
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm, TokenTable
from varlen.models.checkpoint.logit_score import LogitScore
from varlen.request.request import MAX_TOP_K

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.checkpoint.family import MaskedLMLayout
    from varlen.models.checkpoint.vector_layers import SpladeConfig
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder
    from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class TableNames:
    """Names of the tensors that hold the tables.

    Attributes:
        output: the output matrix, `[vocabulary, hidden]`.
    """

    source: str
    target: str
    output: str

    def find(self, tied: Collection[str], present: Container[str]) -> TableNames:
        """Return the names of the tensors to read.

        `self` has the names of tables that are not tied.

        Args:
            tied: names that config.json ties to each other.
        """

        def find(name: str) -> str:
            names = [name, *tied] if name in tied else [name]
            # a missing tensor is reported by its own name
            return next((each for each in names if each in present), name)

        return TableNames(find(self.source), find(self.target), find(self.output))


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a model; equal ones share memory."""

    source: TokenTable
    target: TokenTable
    output: TokenTable

    @property
    def output_weight(self) -> Tensor:
        """The output matrix as `[hidden, vocabulary]`: a view if it is an embedding table too."""
        rows, shared = self.output.rows, (self.source, self.target)
        return rows.t() if any(self.output is each for each in shared) else rows.t().contiguous()


def read_tables(
    read: LayerReader, names: TableNames, hidden: int, *, sources: int, targets: int
) -> Tables:
    """Return the tables of a checkpoint.

    Args:
        sources, targets: sizes of the vocabularies.

    Raises:
        CheckpointError: see `LayerReader`.
    """
    tables: dict[str, TokenTable] = {}

    def table(name: str, rows: int) -> TokenTable:
        if name not in tables:
            found = read.token_table(name, rows, hidden)
            known = list(tables.values())
            tables[name] = read.computed(
                lambda: next((each for each in known if each.is_equal(found)), found)
            )
        return tables[name]

    return Tables(
        table(names.source, sources), table(names.target, targets), table(names.output, targets)
    )


def check_tied(read: LayerReader, name: str, table: TokenTable, *shape: int) -> None:
    """Raise CheckpointError if a matrix that config.json ties to the embedding table is another one.

    Args:
        name: name of the matrix, which the checkpoint may lack.
    """
    if name not in read:
        return
    stored = read.token_table(name, *shape)
    if read.computed(lambda: not stored.is_equal(table)):
        raise CheckpointError(
            f'config.json has tie_word_embeddings true, but the tensor "{name}" is not the embedding table;'
            " set tie_word_embeddings to false"
        )


def read_output(
    read: LayerReader, table: TokenTable, *shape: int, is_tied: bool, name: str = "lm_head"
) -> Linear:
    """Return the output layer, `[hidden, vocabulary]`, a view of the embedding table if they are tied.

    Args:
        is_tied: whether config.json ties the two.

    Raises:
        CheckpointError: the checkpoint has another matrix than the table, though it says that they are tied.
    """
    vocabulary, hidden = shape
    if not is_tied:
        return read.output(name, hidden, vocabulary)
    check_tied(read, f"{name}.weight", table, *shape)
    return read.computed(lambda: Linear(table.rows.t(), None))


def suppress_tokens(output: Linear, tokens: Sequence[int], first: int = 0) -> Linear:
    """Return the output layer with logits of -inf for these tokens.

    Args:
        first: the first token of the layer, which may have a rank's part of them.
    """
    count = output.weight.shape[1]
    places = [token - first for token in tokens if 0 <= token - first < count]
    if not places:
        return output
    bias = output.weight.new_zeros(count) if output.bias is None else output.bias
    bias = bias.clone()
    bias[places] = -inf
    return Linear(output.weight, bias)


def record_output(ops: Recorder, output: Linear | None, hidden: Value, vocab_size: int) -> Value:
    """Record the output layer and return fp32 logits, `[rows, vocab_size]`, on rank 0."""
    import torch

    # Checkpoint.check_task has refused checkpoints without this layer
    assert output is not None
    logits = output.record(ops, hidden)
    logits = logits if logits.dtype == torch.float32 else ops.to_fp32(logits)
    return ops.gather_columns(logits, vocab_size)


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
        shape: vocabulary and hidden features.
    """
    tokens = [each for each in (score.true_token, score.false_token) if each is not None]
    rows = read.fp32.rows(name, *shape, of=tokens)

    def layer() -> Linear:
        row = rows[0] - rows[1] if len(tokens) > 1 else rows[0]
        return Linear(row.reshape(-1, 1).clone(), None)

    return Heads(pooling="last", classifier=read.computed(layer))


@dataclass(frozen=True, slots=True)
class MaskedLM:
    """A loaded head.

    Attributes:
        output: `[features, vocabulary]`, a view of the embedding table if they are tied.
    """

    dense: Linear
    activation: Activation
    norm: Norm
    norm_eps: float
    output: Linear

    def record_rows(self, ops: Recorder, hidden: Value) -> Value:
        """Record what the product with the vocabulary reads, `[rows, features]`."""
        x = self.dense.record_activated(ops, hidden, self.activation)
        return ops.layer_norm(x, self.norm.weight, self.norm.bias, eps=self.norm_eps)

    def record_top_terms(self, ops: Recorder, hidden: Value) -> Value:
        """Record the most likely terms of each mask, `[masks, 2, terms]` fp32; see `top_terms`."""
        rows = self.record_rows(ops, ops.select_rows(hidden, inputs.mask_rows(ops)))
        weight, bias = self.output.weight, self.output.bias
        return ops.top_terms(rows, weight, bias, count=min(MAX_TOP_K, weight.shape[1]))

    def record_term_weights(self, ops: Recorder, hidden: Value, splade: SpladeConfig) -> Value:
        """Record the weight of each term for each sequence, `[sequences, vocabulary]` fp32."""
        rows = self.record_rows(ops, hidden)
        bounds, (weight, bias) = inputs.cu_seqlens(ops), (self.output.weight, self.output.bias)
        return ops.term_weights(rows, weight, bias, bounds, mode=splade.pooling, logs=splade.logs)


def load_masked_lm(read: LayerReader, layout: MaskedLMLayout, table: TokenTable) -> MaskedLM:
    """Return the head of a checkpoint.

    Raises:
        CheckpointError: see `LayerReader`; or the checkpoint has another table than the embeddings, though it says that
            they are tied.
    """
    names, features = layout.names, layout.features
    dense = read.linear([names.dense], layout.hidden, [features], bias=layout.has_dense_bias)
    norm = read.norm(names.norm, features, bias=layout.has_norm_bias)
    weight, shape = f"{names.decoder}.weight", (layout.vocabulary, features)
    if layout.is_tied:
        check_tied(read, weight, table, *shape)
    else:
        table = read.token_table(weight, *shape)
    name = layout.bias_name(read)
    bias = read.tensor(name, layout.vocabulary) if name else None
    return MaskedLM(
        dense=dense,
        activation=layout.activation,
        norm=norm,
        norm_eps=layout.norm_eps,
        output=read.computed(lambda: Linear(table.rows.t(), bias)),
    )
