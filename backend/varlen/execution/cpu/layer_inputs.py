"""Outliers and errors of linear layers, from the inputs that they have in fp32.

The model runs over a few texts twice: once for the largest value of each column of each layer's input, once for the
error of each layer in int8.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor, maximum

from varlen.execution.cpu.quantization import LayerKey, QuantizedLayer, layer_key, linear_weights
from varlen.program.program import Program
from varlen_kernels import cpu
from varlen_kernels.reference.linear_int8 import OUTLIERS

# Gets weight, input, bias and output of a layer.
Observe = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
# Runs the model with these kernels.
Run = Callable[[object], None]


class ObservingKernels:
    """Ops of CPUs that show what linear layers read and write."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe

    def __getattr__(self, name: str) -> object:
        return getattr(cpu, name)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return `reference.linear`."""
        result = cpu.linear(x, weight, bias, out=out)
        self._observe(weight, x, bias, result)
        return result


def find_outliers(programs: Sequence[Program], run: Run) -> dict[LayerKey, Tensor]:
    """Return the columns of each layer's input with the largest values.

    Args:
        programs: programs in fp32 on the CPU.
        run: runs them over texts.

    Returns:
        `[OUTLIERS]` int64, ascending, of each layer.
    """
    largest: dict[LayerKey, Tensor] = {}

    def observe(weight: Tensor, x: Tensor, bias: Tensor | None, _: Tensor) -> None:
        key, most = layer_key(weight, bias), x.abs().amax(0)
        largest[key] = maximum(largest[key], most) if key in largest else most

    run(ObservingKernels(observe))
    return {
        key: largest[key].topk(OUTLIERS).indices.sort().values for key in linear_weights(programs)
    }


def measure_errors(layers: Mapping[LayerKey, QuantizedLayer], run: Run) -> dict[LayerKey, float]:
    """Return the relative error of each layer in int8.

    A layer gets the inputs that it has in fp32, so errors of earlier layers do not count.

    Args:
        layers: the layers in int8.
        run: runs programs of these layers in fp32 over texts.
    """
    squares = {key: np.zeros(2) for key in layers}

    def observe(weight: Tensor, x: Tensor, bias: Tensor | None, exact: Tensor) -> None:
        key = layer_key(weight, bias)
        if layer := layers.get(key):
            # the logits of tokens that are never chosen
            never = exact.isneginf()
            difference = (layer.run(x) - exact).masked_fill(never, 0)
            exact = exact.masked_fill(never, 0)
            squares[key] += [float(difference.square().sum()), float(exact.square().sum())]

    run(ObservingKernels(observe))
    return {
        key: float(np.sqrt(error / max(total, 1e-30))) for key, (error, total) in squares.items()
    }
