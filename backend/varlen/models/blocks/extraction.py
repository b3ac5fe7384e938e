"""The head of a model that extracts spans, all in fp32.

Words and labels are rows of the encoder's result, and words then pass an LSTM. A span is the activated sum of what its
first and its last word add to it, so the two layers behind a span run once for each word and once for each label
instead of once for each span: of the first, each word has its two halves, and the second one belongs to the label.
Source: Zaratiana et al. 2023, arXiv:2311.08526; names as the library gliner saves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.models.checkpoint.layers import LayerReader, Linear

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.checkpoint.extraction import ExtractionConfig
    from varlen.program.program import Attribute, Operand, Value
    from varlen.program.recorder import Recorder

# Names of the two directions of an LSTM.
_DIRECTIONS = ("", "_reverse")
# How much wider the inner layer of a projection is.
_INNER = 4


@dataclass(frozen=True, slots=True)
class Projection:
    """Two linear layers with an activation between them."""

    up: Linear
    down: Linear

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record its result, `[rows, hidden]`."""
        return self.down.record(ops, self.up.record_activated(ops, x, "relu"))

    def record_activated(self, ops: Recorder, x: Value) -> Value:
        """Record the activation of its result, `[rows, hidden]`."""
        return self.down.record_activated(ops, self.up.record_activated(ops, x, "relu"), "relu")


@dataclass(frozen=True, slots=True)
class LstmLayer:
    """A layer of an LSTM in both directions; see `varlen_kernels.reference.bidirectional_lstm`."""

    input_weight: Tensor
    hidden_weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class SpanScorer:
    """Scores spans of words.

    Attributes:
        start, end: projections of the first and the last word of a span.
        start_half, end_half: parts of the next layer that read them.
        label: projection of labels.
        label_inner: the layer behind, `[hidden, inner]`, as labels read it.
        label_offset: its bias likewise, `[hidden, 1]`.
        width: words of the longest span.
    """

    start: Projection
    end: Projection
    start_half: Linear
    end_half: Linear
    label: Projection
    label_inner: Linear
    label_offset: Linear
    width: int

    def record(self, ops: Recorder, words: Value, labels: Value) -> Value:
        """Record the scores of pairs, `[pairs, width]`."""
        starts = self.start_half.record(ops, self.start.record_activated(ops, words))
        ends = self.end_half.record(ops, self.end.record_activated(ops, words))
        label = self.label.record(ops, labels)
        operands = (
            starts,
            ends,
            self.label_inner.record(ops, label),
            self.label_offset.record(ops, label),
            inputs.cu_words(ops),
            inputs.cu_labels(ops),
        )
        return _pairs(ops, "span_scores", operands, self.width, {"width": self.width})


@dataclass(frozen=True, slots=True)
class WordScorer:
    """Scores words that begin, end or continue a span.

    Attributes:
        word, label: make two rows of each word or label: a summand and a factor.
        word_inner, label_inner, mixed: parts of the next layer that read summands, and products of factors.
        output: the layer behind, `[inner, 3]`.
    """

    word: Linear
    word_factor: Linear
    label: Linear
    label_factor: Linear
    word_inner: Linear
    label_inner: Linear
    mixed: Tensor
    output: Linear

    def record(self, ops: Recorder, words: Value, labels: Value) -> Value:
        """Record the scores of pairs, `[pairs, 3]`."""
        operands = (
            self.word_inner.record(ops, self.word.record(ops, words)),
            self.word_factor.record(ops, words),
            self.label_inner.record(ops, self.label.record(ops, labels)),
            self.label_factor.record(ops, labels),
            self.mixed,
            self.output.weight,
            self.output.bias,
            inputs.cu_words(ops),
            inputs.cu_labels(ops),
        )
        return _pairs(ops, "word_scores", operands, 3, {})


def _pairs(
    ops: Recorder,
    kernel: str,
    operands: Sequence[Operand],
    columns: int,
    attributes: Mapping[str, Attribute],
) -> Value:
    """Record an op whose rows are pairs, `[pairs, columns]` fp32."""
    import torch

    result = ("pairs", columns), torch.float32
    (scores,) = ops.call(kernel, operands, [result], attributes=attributes)
    return scores


@dataclass(frozen=True, slots=True)
class Extraction:
    """A loaded head.

    Attributes:
        projection: projection of the encoder's features, if there is one.
        lstm: layers of the LSTM over words.
        scorer: scores words with labels.
    """

    projection: Linear | None
    lstm: tuple[LstmLayer, ...]
    scorer: SpanScorer | WordScorer

    def record(self, ops: Recorder, hidden: Value) -> Value:
        """Record the scores of pairs of a word and a label, `[pairs, columns]` fp32."""
        words, labels = (
            self._features(ops, ops.select_rows(hidden, rows))
            for rows in (inputs.word_rows(ops), inputs.label_rows(ops))
        )
        for layer in self.lstm:
            operands = words, layer.input_weight, layer.hidden_weight, layer.bias
            words = ops.record("bidirectional_lstm", *operands, inputs.cu_words(ops))
        return self.scorer.record(ops, words, labels)

    def _features(self, ops: Recorder, rows: Value) -> Value:
        import torch

        # an encoder without layers has no last norm
        x = rows if rows.dtype == torch.float32 else ops.to_fp32(rows)
        return x if self.projection is None else self.projection.record(ops, x)


def load_extraction(read: LayerReader, config: ExtractionConfig) -> Extraction:
    """Return the head of a checkpoint.

    Args:
        read: reads in fp32.
        config: settings of the checkpoint.

    Raises:
        CheckpointError: see `LayerReader`.
    """
    hidden = config.hidden
    projection = None
    if config.encoder_hidden != hidden:
        projection = read.linear(["token_rep_layer.projection"], config.encoder_hidden, [hidden])
    load = _load_spans if config.scored == "spans" else _load_words
    return Extraction(
        projection=projection,
        lstm=tuple(_load_lstm(read, layer, hidden) for layer in range(config.lstm_layers)),
        scorer=load(read, config),
    )


def _load_lstm(read: LayerReader, layer: int, hidden: int) -> LstmLayer:
    import torch

    half = hidden // 2

    def both(name: str, *shape: int) -> Tensor:
        parts = [read.tensor(f"rnn.lstm.{name}_l{layer}{way}", *shape) for way in _DIRECTIONS]
        return read.computed(lambda: torch.stack(parts))

    inputs_, states = both("bias_ih", 4 * half), both("bias_hh", 4 * half)
    return LstmLayer(
        input_weight=both("weight_ih", 4 * half, hidden),
        hidden_weight=both("weight_hh", 4 * half, half),
        bias=read.computed(lambda: torch.stack([inputs_, states], dim=1)),
    )


def _load_spans(read: LayerReader, config: ExtractionConfig) -> SpanScorer:
    hidden, inner, at = config.hidden, _INNER * config.hidden, "span_rep_layer.span_rep_layer"

    def projection(name: str) -> Projection:
        return Projection(
            read.linear([f"{name}.0"], hidden, [inner]), read.linear([f"{name}.3"], inner, [hidden])
        )

    joined = read.linear([f"{at}.out_project.0"], 2 * hidden, [inner])
    down = read.linear([f"{at}.out_project.3"], inner, [hidden])
    return SpanScorer(
        start=projection(f"{at}.project_start"),
        end=projection(f"{at}.project_end"),
        start_half=read.computed(lambda: Linear(joined.weight[:hidden], joined.bias)),
        end_half=read.computed(lambda: Linear(joined.weight[hidden:], None)),
        label=projection("prompt_rep_layer"),
        label_inner=read.computed(lambda: Linear(down.weight.t().contiguous(), None)),
        label_offset=read.computed(lambda: Linear(_bias(down)[:, None], None)),
        width=config.max_width,
    )


def _load_words(read: LayerReader, config: ExtractionConfig) -> WordScorer:
    hidden, inner = config.hidden, _INNER * config.hidden
    word, label = (
        read.linear([f"scorer.proj_{name}"], hidden, [2 * hidden]) for name in ("token", "label")
    )
    # it reads the summand of the word, of the label, then the product of their factors
    joined = read.linear(["scorer.out_mlp.0"], 3 * hidden, [inner])

    def half(layer: Linear, part: slice) -> Linear:
        return read.computed(lambda: Linear(layer.weight[:, part].contiguous(), _bias(layer)[part]))

    summand, factor = slice(0, hidden), slice(hidden, 2 * hidden)
    return WordScorer(
        word=half(word, summand),
        word_factor=half(word, factor),
        label=half(label, summand),
        label_factor=half(label, factor),
        word_inner=read.computed(lambda: Linear(joined.weight[:hidden], joined.bias)),
        label_inner=read.computed(lambda: Linear(joined.weight[hidden : 2 * hidden], None)),
        mixed=read.computed(lambda: joined.weight[2 * hidden :]),
        output=read.linear(["scorer.out_mlp.3"], inner, [3]),
    )


def _bias(layer: Linear) -> Tensor:
    assert layer.bias is not None
    return layer.bias
