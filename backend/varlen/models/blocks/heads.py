"""The head of each task: the ops on top of an encoder's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Literal, TypeAlias

from varlen.models.blocks import inputs
from varlen.models.checkpoint.vector_layers import SpladeConfig, pools_spans
from varlen_kernels import Activation, Pooling

if TYPE_CHECKING:
    from varlen.models.blocks.extraction import Extraction
    from varlen.models.blocks.output import MaskedLM
    from varlen.models.checkpoint.layers import Linear, Norm
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
