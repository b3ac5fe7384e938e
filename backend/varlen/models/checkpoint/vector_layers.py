"""Dense modules of sentence-transformers: linear layers between pooling and normalization, or of tokens.

Each has a folder of its own with config.json and model.safetensors. They run in fp32, like pooled vectors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import (
    check_fields,
    read_flag,
    read_int,
    read_object,
    show,
)
from varlen.models.checkpoint.weights import CheckpointWeights, check_shapes, read_headers
from varlen_kernels import Activation

if TYPE_CHECKING:
    import torch

    from varlen.models.checkpoint.layers import Linear

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
_KNOWN = ("in_features", "out_features", "bias", "activation_function")


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Settings of one Dense module.

    Attributes:
        path: path of its folder, relative to the checkpoint.
        in_features, out_features, bias: widths and bias of its linear layer.
    """

    path: str
    in_features: int
    out_features: int
    bias: bool
    activation: VectorActivation

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors by name."""
        weight = {"linear.weight": (self.out_features, self.in_features)}
        return weight | ({"linear.bias": (self.out_features,)} if self.bias else {})


@dataclass(frozen=True, slots=True)
class VectorLayer:
    """A loaded Dense module."""

    linear: "Linear"
    activation: VectorActivation


def read_dense(folder: Path, path: str, *, of: str = "sentence_embedding") -> DenseConfig:
    """Return the settings of a Dense module of a checkpoint folder.

    Args:
        path: path of the module's folder, relative to the checkpoint.
        of: vector that it reads and writes, by its name in sentence-transformers.

    Raises:
        CheckpointError: its file is damaged, or asks for something that is not served.
    """
    name = f"{path}/config.json"
    config = read_object(folder, name)
    fixed = {"module_input_name": of, "module_output_name": of, "use_residual": False}
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
    )


def check_widths(layers: Sequence[DenseConfig], features: int) -> None:
    """Raise CheckpointError unless each layer reads as many features as it gets.

    Args:
        layers: layers in order.
    """
    for layer in layers:
        if layer.in_features != features:
            raise CheckpointError(
                f"{layer.path}/config.json has in_features {layer.in_features}; allowed: {features},"
                " the features of the vector in front of it"
            )
        features = layer.out_features


def check_layers(folder: Path, layers: Sequence[DenseConfig]) -> None:
    """Raise CheckpointError unless the files of all layers have their tensors, and no others."""
    for layer in layers:
        headers = read_headers(folder / layer.path)
        check_shapes(headers, layer.shapes, lambda _: False)


def load_layers(
    folder: Path, layers: Sequence[DenseConfig], device: "torch.device"
) -> tuple[VectorLayer, ...]:
    """Return the layers on a device, in fp32.

    Raises:
        CheckpointError: see `check_layers`.
    """
    import torch

    from varlen.models.checkpoint.layers import LayerReader

    loaded = []
    for layer in layers:
        with CheckpointWeights(folder / layer.path) as weights:
            read = LayerReader(weights, torch.float32, device)
            linear = read.linear(
                ["linear"], layer.in_features, [layer.out_features], bias=layer.bias
            )
        loaded.append(VectorLayer(linear, layer.activation))
    return tuple(loaded)
