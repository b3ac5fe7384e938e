"""What is on top of a model's layers: heads of tasks, output layers, tables.

A checkpoint may hold the tables of encoder and decoder and the output matrix once, several times, or as different
tensors. As in transformers 5, each is the tensor of its own name if the checkpoint has it; otherwise it is one of the
tensors that config.json ties it to. A decoder may have a classifier, or the difference of two logits, in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.checkpoint.layers import Linear
from varlen.models.checkpoint.vector_layers import SpladeConfig, pools_spans
from varlen.request.request import MAX_TOP_K
from varlen_kernels import Activation, Pooling

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.extraction import Extraction
    from varlen.models.checkpoint.family import HeadConfig, MaskedLMLayout
    from varlen.models.checkpoint.layers import LayerReader, Norm, TokenTable
    from varlen.models.checkpoint.ranking import LogitScore
    from varlen.models.checkpoint.vector_layers import VectorLayer
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder
    from varlen.tasks import Task

HeadActivation: TypeAlias = Activation | Literal["tanh"]

_DEFAULT_SPLADE = SpladeConfig()


@dataclass(frozen=True, slots=True)
class Heads:
    """The layers on top of an encoder; a classifier's layers are fp32.

    Attributes:
        pooling: pooling of a sequence into a classifier's row.
        pools_dense: whether the outputs of the dense layer are pooled, instead of its inputs.
        classifier: `[hidden, labels]`, of sequences or of tokens; of `question_answer` beginning and end.
    """

    pooling: Literal["cls", "mean", "last"] = "cls"
    dense: Linear | None = None
    activation: HeadActivation = "tanh"
    norm: Norm | None = None
    norm_eps: float = 0.0
    pools_dense: bool = False
    classifier: Linear | None = None
    masked_lm: MaskedLM | None = None
    extraction: Extraction | None = None


def record_head(
    ops: Recorder,
    task: Task,
    heads: Heads,
    hidden: Value,
    pooling: Sequence[Pooling],
    layers: Sequence[VectorLayer] = (),
    splade: SpladeConfig = _DEFAULT_SPLADE,
    *,
    pools_prompt: bool = True,
) -> Value:
    """Record the head of `task` and return its fp32 output.

    Args:
        heads: the layers that the checkpoint has.
        hidden: `[tokens, hidden]`, the encoder's last hidden state.
        pooling: pooling of a sequence into the vector of `embed`; the results of several are concatenated.
        layers: layers that `embed` applies to that vector, and `token_embed` to each token; `sparse_embed` only has
            them where a checkpoint weighs each token.
        splade: settings of `sparse_embed` for weights of terms.
        pools_prompt: whether `embed` pools the prompts before texts too. If not, each batch brings the input
            `unpooled_lengths`.

    Returns:
        embed `[sequences, features]`, or `[pooled, features]` where `pools_spans`; sparse_embed `[sequences,
        vocabulary]`, or `[tokens, 1]` with `layers`; fill_mask `[masks, 2, terms]`; extract `[pairs, columns]`; hidden
        `[tokens, hidden]`; classify, rerank `[sequences, labels]`; token_classify `[tokens, labels]`; question_answer
        `[tokens, 2]`; token_embed `[tokens, features]`.
    """
    import torch

    match task:
        case "hidden":
            answer = ops.to_fp32(hidden)
        case "embed":
            answer = _record_vector(ops, hidden, pooling, layers, pools_prompt=pools_prompt)
        case "token_embed":
            vectors = _record_layers(ops, ops.to_fp32(hidden), layers)
            answer = ops.normalize_rows(vectors, inputs.normalize_tokens(ops))
        case "sparse_embed" if layers:
            # a weight for each token; the runner finds the largest weight of each term
            answer = _record_layers(ops, ops.to_fp32(hidden), layers)
        # Checkpoint.check_task has refused checkpoints without these layers
        case "sparse_embed":
            assert heads.masked_lm is not None
            answer = heads.masked_lm.record_term_weights(ops, hidden, splade)
        case "extract":
            assert heads.extraction is not None
            answer = heads.extraction.record(ops, hidden)
        case "fill_mask":
            assert heads.masked_lm is not None
            answer = heads.masked_lm.record_top_terms(ops, hidden)
        case _:
            assert heads.classifier is not None
            of_tokens = task in ("token_classify", "question_answer")
            is_whole = of_tokens or heads.pools_dense
            row = hidden if is_whole else _one_row(ops, heads, hidden)
            # an encoder without layers has no last norm
            x = row if row.dtype == torch.float32 else ops.to_fp32(row)
            x = _transform(ops, heads, x)
            answer = heads.classifier.record(
                ops, _one_row(ops, heads, x) if heads.pools_dense else x
            )
    return answer


def _one_row(ops: Recorder, heads: Heads, hidden: Value) -> Value:
    if heads.pooling == "cls":
        return ops.first_tokens(hidden, inputs.cu_seqlens(ops))
    return ops.pool(hidden, inputs.cu_seqlens(ops), None, mode=heads.pooling)


def _transform(ops: Recorder, heads: Heads, x: Value) -> Value:
    if heads.dense is None:
        return x
    x = heads.dense.record(ops, x)
    x = ops.tanh(x) if heads.activation == "tanh" else ops.activate(x, kind=heads.activation)
    if heads.norm is None:
        return x
    return ops.layer_norm(x, heads.norm.weight, heads.norm.bias, eps=heads.norm_eps)


def _record_vector(
    ops: Recorder,
    hidden: Value,
    pooling: Sequence[Pooling],
    layers: Sequence[VectorLayer],
    *,
    pools_prompt: bool,
) -> Value:
    has_spans = ops.pools_spans and pools_spans(pooling)
    of: inputs.Pooled = "pooled" if has_spans else "sequences"
    bounds = inputs.cu_pooled(ops) if has_spans else inputs.cu_seqlens(ops)
    rows = inputs.pooled_rows(ops) if has_spans else None
    unpooled = None if pools_prompt else inputs.unpooled_lengths(ops, of)
    normalize = inputs.normalize(ops, of)
    if len(pooling) == 1 and not layers:
        return ops.pool(hidden, bounds, normalize, unpooled, rows, mode=pooling[0])
    pooled = [ops.pool(hidden, bounds, None, unpooled, rows, mode=mode) for mode in pooling]
    x = reduce(ops.concat, pooled)
    return ops.normalize_rows(_record_layers(ops, x, layers), normalize)


def _record_layers(ops: Recorder, x: Value, layers: Sequence[VectorLayer]) -> Value:
    for layer in layers:
        x = layer.record(ops, x)
    return x


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
    """Return the classifier of a checkpoint in fp32, none if its architecture has none."""
    if head.task not in ("classify", "token_classify"):
        return Heads()
    has_bias = head.task == "token_classify"
    layer = read.fp32.linear(["score"], hidden, [head.num_labels], bias=has_bias)
    if temperature != 1.0:
        layer = read.computed(lambda: replace(layer, weight=layer.weight / temperature))
    return Heads(pooling=pooling, classifier=layer)


def _read_logit_score(read: LayerReader, score: LogitScore, name: str, *shape: int) -> Heads:
    """Return the layer whose output is the difference of two logits of the last token."""
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
