"""Layers of sentence-transformers around pooling, SPLADE pooling, and the heads of bge-m3.

WeightedLayerPooling, Dense and LayerNorm have a folder each with config.json and model.safetensors; the rounding of
pplx-embed has neither. They run in fp32, like pooled vectors. Source: base/modules/dense.py,
sentence_transformer/modules/layer_norm.py and weighted_layer_pooling.py of sentence-transformers; st_quantize.py of
perplexity-ai/pplx-embed-v1-0.6b. SPLADE makes weights of terms of logits. Source: Formal et al. 2021, arXiv:2109.10086.

One head of bge-m3 gives a weight to each term of a text, the other one a vector to each token. `varlen convert-pickle`
writes sparse_linear.pt and colbert_linear.pt as folders of these names, each in the form of a Dense module. A weight of
a term is the largest of its tokens, special tokens left out; the first token has no vector.
Source: Chen et al. 2024, arXiv:2402.03216, and inference/embedder/encoder_only/m3.py of FlagEmbedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    TOKENIZER,
    Json,
    check_fields,
    has_file,
    read_choice,
    read_flag,
    read_int,
    read_object,
    show,
)
from varlen.models.checkpoint.weights import CheckpointWeights, check_shapes, read_headers
from varlen_kernels import Activation, Pooling, TermPooling

if TYPE_CHECKING:
    import torch

    from varlen.models.checkpoint.layers import LayerReader, Linear, Norm
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

VectorActivation: TypeAlias = Activation | Literal["tanh", "identity"]
# By the last part of a class name in torch.
_ACTIVATIONS: Mapping[str, VectorActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
# What sentence-transformers takes where the file names none.
_DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"
_KNOWN = ("in_features", "out_features", "bias", "activation_function", "use_residual")
# What torch.nn.LayerNorm adds to a variance; no file names another one.
_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Settings of one Dense module.

    Attributes:
        in_features, out_features, bias: widths and bias of its linear layer.
        has_residual: whether its input is added to its output, by a linear layer where they differ in width.
    """

    path: str
    in_features: int
    out_features: int
    bias: bool
    activation: VectorActivation
    has_residual: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        size = self.out_features, self.in_features
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": size}
        if self.bias:
            shapes["linear.bias"] = (self.out_features,)
        if self.projects_residual:
            shapes["residual.weight"] = size
        return shapes

    @property
    def projects_residual(self) -> bool:
        """Whether a linear layer gives the residual the width of the output."""
        return self.has_residual and self.in_features != self.out_features

    @property
    def shown(self) -> str:
        residual = ", residual" if self.has_residual else ""
        return f"dense {self.in_features} to {self.out_features}, {self.activation}{residual}"

    def load(self, read: LayerReader) -> DenseLayer:
        size = self.in_features, [self.out_features]
        projects = self.projects_residual
        return DenseLayer(
            read.linear(["linear"], *size, bias=self.bias),
            self.activation,
            self.has_residual,
            read.linear(["residual"], *size, bias=False) if projects else None,
        )


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Settings of one LayerNorm module."""

    path: str
    in_features: int

    @property
    def out_features(self) -> int:
        return self.in_features

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("norm.weight", "norm.bias"), (self.in_features,))

    @property
    def shown(self) -> str:
        return "layer norm"

    def load(self, read: LayerReader) -> NormLayer:
        return NormLayer(read.norm("norm", self.in_features))


VectorConfig: TypeAlias = DenseConfig | NormConfig


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A loaded Dense module.

    Attributes:
        projection: makes the residual of its input; None where that is its input.
    """

    linear: Linear
    activation: VectorActivation
    has_residual: bool
    projection: Linear | None

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record activation(x @ weight + bias), plus its residual, `[rows, out]` fp32."""
        y = self.linear.record(ops, x)
        if self.activation == "tanh":
            y = ops.tanh(y)
        elif self.activation != "identity":
            y = ops.activate(y, kind=self.activation)
        if not self.has_residual:
            return y
        residual = x if self.projection is None else self.projection.record(ops, x)
        return ops.record("add", y, residual)


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A loaded LayerNorm module."""

    norm: Norm

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record the norm of each row, `[rows, features]` fp32."""
        return ops.layer_norm(x, self.norm.weight, self.norm.bias, eps=_NORM_EPS)


@dataclass(frozen=True, slots=True)
class RoundLayer:
    """The module FlexibleQuantizer of pplx-embed, whose vectors are whole numbers."""

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record round(127 · tanh(x)), `[rows, features]` fp32."""
        return ops.record("round_tanh", x, limit=127.0)


VectorLayer: TypeAlias = DenseLayer | NormLayer | RoundLayer


@dataclass(frozen=True, slots=True)
class LayerMix:
    """Settings of the module WeightedLayerPooling, the weighted mean of the outputs of layers.

    Attributes:
        num_layers: number of layers of the model. The output of layer 0 are its embeddings.
    """

    path: str
    num_layers: int
    first: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"layer_weights": (self.num_layers + 1 - self.first,)}

    def load(self, folder: Path) -> list[float]:
        """Return the factor of each output, which add up to 1, given the checkpoint folder.

        Raises:
            CheckpointError: see `check`.
        """
        import torch

        from varlen.models.checkpoint.layers import LayerReader

        with CheckpointWeights(folder / self.path) as weights:
            read = LayerReader(weights, torch.float32, torch.device("cpu"))
            (size,) = self.shapes["layer_weights"]
            found = read.tensor("layer_weights", size)
        return [0.0] * self.first + (found / found.sum()).tolist()

    def check(self, folder: Path) -> None:
        """Raise CheckpointError unless its file has its weights, and nothing else."""
        check_shapes(read_headers(folder / self.path), self.shapes, lambda _: False)


def pools_spans(pooling: Sequence[Pooling]) -> bool:
    """Return whether spans have vectors of their own, the means of their tokens."""
    return tuple(pooling) == ("mean",)


def read_layer_mix(folder: Path, path: str, model: Json) -> LayerMix | None:
    """Return the settings of a WeightedLayerPooling module of a checkpoint folder.

    None if it has no effect: sentence-transformers gives it the outputs of layers only if config.json says so.

    Raises:
        CheckpointError: its file is damaged, or does not fit the model.
    """
    name = f"{path}/config.json"
    config = read_object(folder, name)
    widths = ("embedding_dimension", "word_embedding_dimension")
    check_fields(config, name, known=(*widths, "num_hidden_layers", "layer_start"), fixed={})
    if not read_flag(model, "output_hidden_states", default=False):
        return None
    found = read_int(config, "num_hidden_layers", default=12, name=name)
    first = read_int(config, "layer_start", lowest=0, default=4, name=name)
    fields = ("num_hidden_layers", "n_layers")
    layers = next((model[field] for field in fields if field in model), None)
    if found != layers or first > found:
        raise CheckpointError(
            f"{name} has num_hidden_layers {found} and layer_start {first}; allowed: {layers}, the layers of the"
            " model, and at most as many"
        )
    return LayerMix(path, found, first)


def read_norm(folder: Path, path: str) -> NormConfig:
    """Return the settings of a LayerNorm module of a checkpoint folder.

    Raises:
        CheckpointError: its file is damaged, or asks for something that is not served.
    """
    name = f"{path}/config.json"
    config = read_object(folder, name)
    check_fields(config, name, known=("dimension",), fixed={})
    return NormConfig(path, read_int(config, "dimension", name=name))


def read_dense(folder: Path, path: str, *, of: str = "sentence_embedding") -> DenseConfig:
    """Return the settings of a Dense module of a checkpoint folder.

    Args:
        of: vector that it reads and writes, by its name in sentence-transformers.

    Raises:
        CheckpointError: its file is damaged, or asks for something that is not served.
    """
    name = f"{path}/config.json"
    config = read_object(folder, name)
    fixed = dict.fromkeys(("module_input_name", "module_output_name"), of)
    check_fields(config, name, known=_KNOWN, fixed=fixed)
    activation = config.get("activation_function", _DEFAULT_ACTIVATION)
    kind = str(activation).rpartition(".")[-1]
    if kind not in _ACTIVATIONS:
        raise CheckpointError(
            f"{name} has activation_function {show(activation)}; allowed: {', '.join(_ACTIVATIONS)}"
        )
    return DenseConfig(
        path,
        read_int(config, "in_features", name=name),
        read_int(config, "out_features", name=name),
        read_flag(config, "bias", default=True, name=name),
        _ACTIVATIONS[kind],
        read_flag(config, "use_residual", default=False, name=name),
    )


def check_widths(layers: Sequence[VectorConfig], features: int) -> None:
    """Raise CheckpointError unless each layer reads as many features as it gets."""
    for layer in layers:
        if layer.in_features != features:
            name = "in_features" if isinstance(layer, DenseConfig) else "dimension"
            raise CheckpointError(
                f"{layer.path}/config.json has {name} {layer.in_features}; allowed: {features},"
                " the features of the vector in front of it"
            )
        features = layer.out_features


def check_layers(folder: Path, layers: Sequence[VectorConfig]) -> None:
    """Raise CheckpointError unless the files of all layers have their tensors, and no others."""
    for layer in layers:
        headers = read_headers(folder / layer.path)
        check_shapes(headers, layer.shapes, lambda _: False)


def load_layers(
    folder: Path, layers: Sequence[VectorConfig], device: torch.device
) -> tuple[VectorLayer, ...]:
    """Return the layers on a device, in fp32.

    Raises:
        CheckpointError: see `check_layers`.
    """
    import torch

    from varlen.models.checkpoint.layers import LayerReader

    loaded: list[VectorLayer] = []
    for layer in layers:
        with CheckpointWeights(folder / layer.path) as weights:
            loaded.append(layer.load(LayerReader(weights, torch.float32, device)))
    return tuple(loaded)


_POOLINGS: Mapping[str, TermPooling] = {"max": "max", "sum": "sum"}
# How often log(1 + ...) is applied. Source of the second: arXiv:2504.14839.
_LOGS: Mapping[str, int] = {"relu": 1, "log1p_relu": 2}
# embedding_dimension is the number of terms, or null.
_SPLADE_FIELDS = (
    "pooling_strategy",
    "activation_function",
    "embedding_dimension",
    "word_embedding_dimension",
)


@dataclass(frozen=True, slots=True)
class SpladeConfig:
    """How weights of terms are made.

    Attributes:
        logs: number of times that log(1 + ...) is applied to a positive logit.
        max_active_dims: number of largest weights to keep in a vector, unless a request says it; None is all.
    """

    pooling: TermPooling = "max"
    logs: int = 1
    max_active_dims: int | None = None


def read_splade(folder: Path, path: str, max_active_dims: int | None) -> SpladeConfig:
    """Return the settings of a SpladePooling module.

    Raises:
        CheckpointError: its file is damaged, or asks for something that is not served.
    """
    name = f"{path}/config.json"
    config = read_object(folder, name)
    check_fields(config, name, known=_SPLADE_FIELDS, fixed={})
    return SpladeConfig(
        read_choice(config, "pooling_strategy", _POOLINGS, default="max", name=name),
        read_choice(config, "activation_function", _LOGS, default="relu", name=name),
        max_active_dims,
    )


SPARSE, VECTORS = "sparse_linear", "colbert_linear"
# Tokens without a weight, by their names in tokenizer_config.json.
_UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class M3Heads:
    """The heads that a checkpoint has.

    Attributes:
        sparse: layer of the weight of a token, of `sparse_embed`.
        vectors: layer of its vector, of `token_embed`.
    """

    sparse: DenseConfig | None
    vectors: DenseConfig | None
    unweighted: tuple[int, ...]


def read_m3_heads(
    folder: Path, hidden_size: int, special_tokens: Mapping[str, str]
) -> M3Heads | None:
    """Return the heads in a checkpoint folder, None without any.

    Raises:
        CheckpointError: a file of them is damaged, or does not fit the model.
    """
    sparse = _read(folder, SPARSE, hidden_size, "relu", 1)
    vectors = _read(folder, VECTORS, hidden_size, "identity", None)
    if sparse is None and vectors is None:
        return None
    texts = {special_tokens[name] for name in _UNWEIGHTED if name in special_tokens}
    return M3Heads(sparse, vectors, _ids_of(folder, texts) if sparse else ())


def _read(
    folder: Path, path: str, hidden_size: int, activation: str, features: int | None
) -> DenseConfig | None:
    if not has_file(folder, f"{path}/config.json"):
        return None
    layer = read_dense(folder, path)
    fits = layer.in_features == hidden_size and features in (None, layer.out_features)
    if not fits or layer.activation != activation or layer.has_residual:
        raise CheckpointError(
            f"{path}/config.json has the layer {layer.shown}; allowed: {hidden_size} to"
            f" {'any number' if features is None else features}, {activation}"
        )
    return layer


def _ids_of(folder: Path, texts: Collection[str]) -> tuple[int, ...]:
    tokenizer: Any = read_object(folder, TOKENIZER)
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = vocabulary if isinstance(vocabulary, dict) else {}
    try:
        ids = {**ids, **{str(token["content"]): int(token["id"]) for token in added or ()}}
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{TOKENIZER} has added_tokens {show(added)}; allowed: a list of objects with content and id"
        ) from None
    return tuple(sorted(ids[text] for text in texts if text in ids))
