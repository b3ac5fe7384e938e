"""Numbers of activations, for compiled code."""

from collections.abc import Mapping

from varlen_kernels import Activation

NO_ACTIVATION, GELU, GELU_TANH, SILU, RELU = range(5)
ACTIVATIONS: Mapping[Activation, int] = {
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "silu": SILU,
    "relu": RELU,
}
