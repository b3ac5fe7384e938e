"""Codes and errors of linear layers, from the inputs that they have in fp32.

The model runs over a few texts several times: for the inputs of as many layers as memory allows, and once for the
error of each layer in int8.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from torch import Tensor, maximum

from varlen.execution.int8.quantization import (
    LayerCodes,
    LayerKey,
    QuantizedLayer,
    WeightBits,
    layer_key,
    linear_weights,
)
from varlen.execution.int8.rounding import TOGETHER, rounded_codes
from varlen.program.program import Program
from varlen_kernels import cpu
from varlen_kernels.reference.linear_int8 import OUTLIERS

# Gets weight, input, bias and output of a layer.
Observe = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
Run = Callable[[object], None]
# Gets a stage of the work, and how much of it is done, of how much in all.
OnProgress = Callable[[str, int, int], object]

# Sums of products of columns that are held at a time, in elements of fp32: 256 MiB.
_MOST_SUMS = 2**26


class ObservingKernels:
    """Ops of CPUs that show what linear layers read and write."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe

    def __getattr__(self, name: str) -> object:
        return getattr(cpu, name)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        result = cpu.linear(x, weight, bias, out=out)
        self._observe(weight, x, bias, result)
        return result


def choose_codes(
    programs: Sequence[Program],
    run: Run,
    bits: WeightBits = 8,
    on_progress: OnProgress = lambda *_: None,
) -> dict[LayerKey, LayerCodes]:
    """Return the outliers and the codes of each layer, for inputs of these texts.

    The columns with the largest values are the outliers.

    Args:
        programs: programs in fp32 on the CPU.
        on_progress: function to call after each layer.
    """
    weights = linear_weights(programs)
    chosen: dict[LayerKey, LayerCodes] = {}
    for group in _groups({key: len(weight) for key, (weight, _) in weights.items()}):
        for key, (largest, grams) in _observed(group, run).items():
            weight, _ = weights[key]
            outliers = largest.topk(OUTLIERS).indices.sort().values
            chosen[key] = LayerCodes(outliers, rounded_codes(weight, outliers, grams, bits))
            on_progress("choosing codes of layers", len(chosen), len(weights))
    return {key: chosen[key] for key in weights}


def _groups(columns: Mapping[LayerKey, int]) -> list[list[LayerKey]]:
    """Divide layers into groups whose sums of products fit into memory.

    Args:
        columns: number of columns of each layer's input.
    """
    groups: list[list[LayerKey]] = []
    room = 0
    for key, number in columns.items():
        size = number * min(number, TOGETHER)
        if not groups or size > room:
            groups.append([])
            room = _MOST_SUMS
        groups[-1].append(key)
        room -= size
    return groups


def _observed(keys: Collection[LayerKey], run: Run) -> dict[LayerKey, tuple[Tensor, list[Tensor]]]:
    """Return largest values and sums of products of the columns of layers' inputs.

    Returns:
        `[hidden]` fp32 of each layer, and the sums that `rounded_codes` gets.
    """
    observed: dict[LayerKey, tuple[Tensor, list[Tensor]]] = {}

    def observe(weight: Tensor, x: Tensor, bias: Tensor | None, _: Tensor) -> None:
        key = layer_key(weight, bias)
        if key not in keys:
            return
        largest = x.abs().amax(0)
        parts = [x[:, first : first + TOGETHER] for first in range(0, x.shape[1], TOGETHER)]
        if key not in observed:
            observed[key] = largest, [part.t() @ part for part in parts]
            return
        before, grams = observed[key]
        for gram, part in zip(grams, parts, strict=True):
            gram.addmm_(part.t(), part)
        observed[key] = maximum(before, largest), grams

    run(ObservingKernels(observe))
    return observed


def measure_errors(layers: Mapping[LayerKey, QuantizedLayer], run: Run) -> dict[LayerKey, float]:
    """Return the relative error of each layer in int8.

    A layer gets the inputs that it has in fp32, so errors of earlier layers do not count.

    Args:
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
