"""The head of a model that extracts spans, all in fp32.

Words and labels are rows of the encoder's result, and words then pass an LSTM. A span is the activated sum of what its
first and its last word add to it, so the two layers behind a span run once for each word and once for each label
instead of once for each span: of the first, each word has its two halves, and the second one belongs to the label.
In GLiNER2, labels have instances: things that a text may have several of, such as relations. A task has a token, which
says how many there are. Labels of an instance pass a gated recurrent unit, which reads the numbers up to the
instance's, and layers in which they may read each other. Labels of a classification are scored without a span.
In a bi-encoder, the result for a label depends on no text: a program of its own makes it.
Sources: Zaratiana et al. 2023, arXiv:2311.08526, and 2025, arXiv:2507.18546; names as the libraries gliner and gliner2
save them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from varlen.models.blocks import inputs
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm
from varlen.program.rank import AttentionHeads
from varlen.request.schema import MOST_COUNT

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.checkpoint.extraction import ExtractionConfig
    from varlen.models.registry import EncoderModel
    from varlen.program.program import Attribute, Operand, Value
    from varlen.program.recorder import Recorder

# How much wider the inner layer of a projection is.
_INNER = 4
# The transformer over labels of GLiNER2, with the defaults of `TransformerEncoderLayer`.
_LABEL_LAYERS, _LABEL_HEADS, _LABEL_EPS = 2, AttentionHeads(4, 4, 32), 1e-5


@dataclass(frozen=True, slots=True)
class Projection:
    """Two linear layers with an activation between them."""

    up: Linear
    down: Linear

    def record(self, ops: Recorder, x: Value) -> Value:
        return self.down.record(ops, self.up.record_activated(ops, x, "relu"))

    def record_activated(self, ops: Recorder, x: Value) -> Value:
        return self.down.record_activated(ops, self.up.record_activated(ops, x, "relu"), "relu")


@dataclass(frozen=True, slots=True)
class LstmLayer:
    """A layer of an LSTM in both directions; see `varlen_kernels.reference.bidirectional_lstm`."""

    input_weight: Tensor
    hidden_weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class LabelLayer:
    """A layer of a transformer whose tokens are the labels of an instance."""

    qkv: Linear
    attended: Linear
    norm: Norm
    up: Linear
    down: Linear
    last_norm: Norm

    def record(self, ops: Recorder, x: Value) -> Value:
        qkv = self.qkv.record(ops, x)
        mixed = ops.attention_varlen(qkv, inputs.cu_instances(ops), _LABEL_HEADS)
        x = _normed_sum(ops, self.attended.record(ops, mixed), x, self.norm)
        y = self.down.record(ops, self.up.record_activated(ops, x, "relu"))
        return _normed_sum(ops, y, x, self.last_norm)


@dataclass(frozen=True, slots=True)
class LabelMixer:
    """Layers that let the labels of an instance read each other."""

    into: Linear
    layers: tuple[LabelLayer, ...]
    joined: Linear
    last: Projection

    def record(self, ops: Recorder, states: Value, labels: Value) -> Value:
        both = ops.record("add", states, labels)
        x = self.into.record(ops, both)
        for layer in self.layers:
            x = layer.record(ops, x)
        x = self.joined.record_activated(ops, ops.concat(x, both), "relu")
        return self.last.record(ops, x)


@dataclass(frozen=True, slots=True)
class CountedLabels:
    """Makes the vectors that spans are multiplied with, of labels of GLiNER2.

    Attributes:
        classes: scores a label of a classification.
        gates: summand of the gates of the recurrent unit, `[numbers, 3 · hidden]`: its inputs are numbers.
        states: makes the other summand of a state.
    """

    counts: Projection
    classes: Projection
    gates: Tensor
    states: Linear
    mixed: Projection | LabelMixer

    def record(self, ops: Recorder, labels: Value) -> Value:
        weights = self.gates, self.states.weight, _bias(self.states)
        states = ops.record("gru_states", labels, *weights, *_instances(ops))
        if isinstance(self.mixed, Projection):
            return self.mixed.record(ops, ops.concat(states, labels))
        return self.mixed.record(ops, states, labels)

    def record_counted(
        self, ops: Recorder, labels: Value, tasks: Value, inner: Value, offsets: Value
    ) -> tuple[Value, Value]:
        """Record the results for labels with the counts of instances; see `varlen_kernels.reference.count_labels`."""
        scores = self.classes.record(ops, labels), self.counts.record(ops, tasks)
        made, counted = ops.record_all(
            "count_labels", (inner, offsets, *scores, *_instances(ops)), {}
        )
        return made, counted


def _instances(ops: Recorder) -> tuple[Value, Value]:
    return inputs.cu_instances(ops), inputs.instance_numbers(ops)


@dataclass(frozen=True, slots=True)
class SpanScorer:
    """Scores spans of words.

    Attributes:
        start_half, end_half: parts of the next layer that read them.
        label: projection of labels, or what they become in GLiNER2.
        label_inner: the layer behind, `[hidden, inner]`, as labels read it.
        label_offset: its bias likewise, `[hidden, 1]`.
    """

    start: Projection
    end: Projection
    start_half: Linear
    end_half: Linear
    label: Projection | CountedLabels
    label_inner: Linear
    label_offset: Linear
    width: int

    @property
    def label_sizes(self) -> tuple[int, int]:
        return self.label_inner.weight.shape[1], 1

    def record_labels(
        self, ops: Recorder, labels: Value, tasks: Value | None
    ) -> tuple[Value, Value]:
        """Record what spans are multiplied with, `[labels, inner]`, and what is added, `[labels, 1]`."""
        label = self.label.record(ops, labels)
        made = self.label_inner.record(ops, label), self.label_offset.record(ops, label)
        if not isinstance(self.label, CountedLabels):
            return made
        assert tasks is not None
        return self.label.record_counted(ops, labels, tasks, *made)

    def record(self, ops: Recorder, words: Value, labels: tuple[Value, Value]) -> Value:
        """Record the scores of pairs, `[pairs, width]`, given `record_labels`."""
        operands = (
            self.start_half.record(ops, self.start.record_activated(ops, words)),
            self.end_half.record(ops, self.end.record_activated(ops, words)),
            *labels,
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

    @property
    def label_sizes(self) -> tuple[int, int]:
        return self.label_inner.weight.shape[1], self.label_factor.weight.shape[1]

    def record_labels(
        self, ops: Recorder, labels: Value, tasks: Value | None
    ) -> tuple[Value, Value]:
        assert tasks is None
        summands = self.label_inner.record(ops, self.label.record(ops, labels))
        return summands, self.label_factor.record(ops, labels)

    def record(self, ops: Recorder, words: Value, labels: tuple[Value, Value]) -> Value:
        """Record the scores of pairs, `[pairs, 3]`, given `record_labels`."""
        operands = (
            self.word_inner.record(ops, self.word.record(ops, words)),
            self.word_factor.record(ops, words),
            *labels,
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
class LabelEncoder:
    """Reads each label apart: the mean of its tokens is its vector."""

    model: EncoderModel
    projection: Linear | None

    def record(self, ops: Recorder) -> Value:
        """Record the vector of each label, `[labels, hidden]` fp32."""
        hidden = _in_fp32(ops, self.model.record(ops))
        vector = ops.pool(hidden, inputs.cu_seqlens(ops), None, mode="mean")
        return vector if self.projection is None else self.projection.record(ops, vector)


@dataclass(frozen=True, slots=True)
class Extraction:
    """A loaded head.

    Attributes:
        labels: reads labels, if they are no tokens of the text.
    """

    projection: Linear | None
    lstm: tuple[LstmLayer, ...]
    scorer: SpanScorer | WordScorer
    reads_task: bool
    labels: LabelEncoder | None

    def record(self, ops: Recorder, hidden: Value) -> Value:
        """Record the scores of pairs of a word and a label, `[pairs, columns]` fp32."""
        words = self._features(ops, ops.select_rows(hidden, inputs.word_rows(ops)))
        for layer in self.lstm:
            operands = words, layer.input_weight, layer.hidden_weight, layer.bias
            words = ops.record("bidirectional_lstm", *operands, inputs.cu_words(ops))
        return self.scorer.record(ops, words, self._labels(ops, hidden))

    def record_labels(self, ops: Recorder) -> Value | None:
        """Record what `record` reads of labels, side by side; None if the text has them."""
        if self.labels is None:
            return None
        return ops.concat(*self.scorer.record_labels(ops, self.labels.record(ops), None))

    def _labels(self, ops: Recorder, hidden: Value) -> tuple[Value, Value]:
        if self.labels is not None:
            first, second = self.scorer.label_sizes
            return inputs.label_part(ops, 0, first), inputs.label_part(ops, 1, second)
        labels = self._features(ops, ops.select_rows(hidden, inputs.label_rows(ops)))
        tasks = None
        if self.reads_task:
            tasks = self._features(ops, ops.select_rows(hidden, inputs.task_rows(ops)))
        return self.scorer.record_labels(ops, labels, tasks)

    def _features(self, ops: Recorder, rows: Value) -> Value:
        x = _in_fp32(ops, rows)
        return x if self.projection is None else self.projection.record(ops, x)


def _in_fp32(ops: Recorder, rows: Value) -> Value:
    """Record rows in fp32, which the last norm gives; an encoder without layers has none."""
    import torch

    return rows if rows.dtype == torch.float32 else ops.to_fp32(rows)


def load_extraction(read: LayerReader, config: ExtractionConfig, labels: Any = None) -> Extraction:
    """Return the head of a checkpoint.

    Args:
        labels: the `EncoderModel` of labels, if it has one; a check of headers has none.

    Raises:
        CheckpointError: see `LayerReader`.
    """
    hidden = config.hidden
    projection = _load_features(read, "projection", config.encoder_hidden, hidden)
    label_encoder = None
    lstm = tuple(_load_lstm(read, layer, hidden) for layer in range(config.lstm_layers))
    if config.labels is not None:
        # the library does not run its LSTM
        of_labels = _load_features(read, "labels_projection", config.labels.hidden, hidden)
        label_encoder, lstm = LabelEncoder(labels, of_labels), ()
    load = _load_words if config.scored == "words" else _load_spans
    return Extraction(
        projection=projection,
        lstm=lstm,
        scorer=load(read, config),
        reads_task=config.count_layer is not None,
        labels=label_encoder,
    )


def _load_features(read: LayerReader, name: str, fan_in: int, fan_out: int) -> Linear | None:
    """Return the projection of an encoder's features, if their number differs."""
    if fan_in == fan_out:
        return None
    return read.linear([f"token_rep_layer.{name}"], fan_in, [fan_out])


def _load_lstm(read: LayerReader, layer: int, hidden: int) -> LstmLayer:
    import torch

    half = hidden // 2

    def both(name: str, *shape: int) -> Tensor:
        parts = [read.tensor(f"rnn.lstm.{name}_l{layer}{way}", *shape) for way in ("", "_reverse")]
        return read.computed(lambda: torch.stack(parts))

    inputs_, states = both("bias_ih", 4 * half), both("bias_hh", 4 * half)
    return LstmLayer(
        input_weight=both("weight_ih", 4 * half, hidden),
        hidden_weight=both("weight_hh", 4 * half, half),
        bias=read.computed(lambda: torch.stack([inputs_, states], dim=1)),
    )


def _load_spans(read: LayerReader, config: ExtractionConfig) -> SpanScorer:
    hidden, inner = config.hidden, _INNER * config.hidden
    is_counted = config.count_layer is not None
    at = f"{'span_rep' if is_counted else 'span_rep_layer'}.span_rep_layer"

    def projection(name: str) -> Projection:
        # the layer between them is dropout
        return _load_projection(read, name, (0, 3), (hidden, inner, hidden))

    joined = read.linear([f"{at}.out_project.0"], 2 * hidden, [inner])
    down = read.linear([f"{at}.out_project.3"], inner, [hidden])
    return SpanScorer(
        start=projection(f"{at}.project_start"),
        end=projection(f"{at}.project_end"),
        start_half=read.computed(lambda: Linear(joined.weight[:hidden], joined.bias)),
        end_half=read.computed(lambda: Linear(joined.weight[hidden:], None)),
        label=_load_counted(read, config) if is_counted else projection("prompt_rep_layer"),
        label_inner=read.computed(lambda: Linear(down.weight.t().contiguous(), None)),
        label_offset=read.computed(lambda: Linear(_bias(down)[:, None], None)),
        width=config.max_width,
    )


def _load_counted(read: LayerReader, config: ExtractionConfig) -> CountedLabels:
    hidden, at = config.hidden, "count_embed"
    numbers = read.tensor(f"{at}.pos_embedding.weight", MOST_COUNT, hidden)
    of_input, of_state = (
        _load_parameters(read, f"{at}.gru.{{}}_{kind}_l0", hidden, 3 * hidden)
        for kind in ("ih", "hh")
    )
    if config.count_layer == "projected":
        sizes = 2 * hidden, _INNER * hidden, hidden
        mixed: Projection | LabelMixer = _load_projection(read, f"{at}.projector", (0, 2), sizes)
    else:
        mixed = _load_mixer(read, f"{at}.transformer", hidden)
    counts, classes = (
        _load_projection(read, name, (0, 2), (hidden, 2 * hidden, features))
        for name, features in (("count_pred", MOST_COUNT), ("classifier", 1))
    )
    return CountedLabels(
        counts=counts,
        classes=classes,
        gates=read.computed(lambda: numbers @ of_input.weight + _bias(of_input)),
        states=of_state,
        mixed=mixed,
    )


def _load_mixer(read: LayerReader, name: str, hidden: int) -> LabelMixer:
    features = _LABEL_HEADS.width

    def layer(number: int) -> LabelLayer:
        at = f"{name}.transformer.layers.{number}"
        return LabelLayer(
            qkv=_load_parameters(read, f"{at}.self_attn.in_proj_{{}}", features, 3 * features),
            attended=read.linear([f"{at}.self_attn.out_proj"], features, [features]),
            norm=read.norm(f"{at}.norm1", features),
            up=read.linear([f"{at}.linear1"], features, [2 * features]),
            down=read.linear([f"{at}.linear2"], 2 * features, [features]),
            last_norm=read.norm(f"{at}.norm2", features),
        )

    return LabelMixer(
        into=read.linear([f"{name}.in_projector"], hidden, [features]),
        layers=tuple(map(layer, range(_LABEL_LAYERS))),
        joined=read.linear([f"{name}.out_projector.0"], features + hidden, [hidden]),
        last=_load_projection(read, f"{name}.out_projector", (2, 4), (hidden, hidden, hidden)),
    )


def _load_projection(
    read: LayerReader, name: str, places: tuple[int, int], sizes: tuple[int, int, int]
) -> Projection:
    """Return two layers at these places in a list of layers.

    Args:
        sizes: features of the input, between them, and of the result.
    """
    (first, last), (fan_in, inner, fan_out) = places, sizes
    return Projection(
        read.linear([f"{name}.{first}"], fan_in, [inner]),
        read.linear([f"{name}.{last}"], inner, [fan_out]),
    )


def _load_parameters(read: LayerReader, at: str, fan_in: int, fan_out: int) -> Linear:
    """Return a layer whose tensors are parameters of a larger module of torch.

    Args:
        at: their names, with `{}` for weight or bias.
    """
    weight, bias = (
        read.tensor(at.format("weight"), fan_out, fan_in),
        read.tensor(at.format("bias"), fan_out),
    )
    return read.computed(lambda: Linear(weight.t().contiguous(), bias))


def _normed_sum(ops: Recorder, x: Value, residual: Value, norm: Norm) -> Value:
    return ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=_LABEL_EPS)


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
