"""Codes and errors of linear layers, from the inputs that they have in fp32.

The model runs over a few texts in one batch. As soon as a layer has run, its codes are chosen in another thread, so a
core runs the model and the others choose. Texts that need several batches are run once for each group of layers whose
sums fit into memory.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore

import torch
from torch import Tensor

from varlen.execution.int8.calibration import LayerCalibration
from varlen.execution.int8.quantization import (
    LayerKey,
    QuantizedLayer,
    WeightBits,
    layer_key,
    linear_weights,
    product_of,
)
from varlen.execution.int8.rounding import rounded_codes, stored_codes
from varlen.program.program import Program
from varlen_kernels import cpu
from varlen_kernels.reference.linear_int8 import OUTLIERS

# Gets weight, input, bias and output of a layer.
Observe = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
# Runs the model with these kernels.
Run = Callable[[object], None]
# Gets a stage of the work, and how much of it is done, of how much in all.
OnProgress = Callable[[str, int, int], object]

# Sums of products of columns that are held at a time, in elements of fp32: 256 MiB.
_MOST_SUMS = 2**26
# Most columns whose errors are corrected together.
_TOGETHER = 512
# Rows of a batch on which the error of a layer is measured.
_ERROR_ROWS = 512


class ObservingKernels:
    """Ops of CPUs that show what linear layers read and write."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe

    def __getattr__(self, name: str) -> object:
        return getattr(cpu, name)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        result: Tensor = cpu.linear(x, weight, bias, out=out)
        self._observe(weight, x, bias, result)
        return result


class _Layer:
    """A linear layer while its inputs are observed.

    Attributes:
        left: number of inputs that follow.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, inputs: int) -> None:
        self.left = inputs
        self._weight, self._bias = weight, bias
        self._largest = weight.new_zeros(len(weight))
        self._grams: list[Tensor] = []
        self._rows: list[tuple[Tensor, Tensor]] = []

    def keep_rows(self, x: Tensor, exact: Tensor) -> None:
        """Copy rows of an input and of its output, which measure the error."""
        step = -(-len(x) // _ERROR_ROWS)
        self._rows.append((x[::step].clone(), exact[::step].clone()))

    def add(self, x: Tensor) -> None:
        """Add an input to the sums of products of two columns."""
        self._largest = torch.maximum(self._largest, x.abs().amax(0))
        parts = x.tensor_split(-(-x.shape[1] // _TOGETHER), 1)
        self._grams = self._grams or [x.new_zeros(part.shape[1], part.shape[1]) for part in parts]
        for gram, part in zip(self._grams, parts, strict=True):
            gram.addmm_(part.t(), part)

    @torch.inference_mode()
    def calibrate(self, x: Tensor, bits: WeightBits) -> LayerCalibration:
        """Return the calibration of the layer, given its last input."""
        self.add(x)
        # the columns with the largest values
        outliers = self._largest.topk(OUTLIERS).indices.sort().values
        chosen = stored_codes(self._weight, outliers, bits)
        chosen = chosen or rounded_codes(self._weight, outliers, self._grams, bits)
        self._grams = []
        product = product_of(bits)
        operand = product.quantize(self._weight, self._bias, outliers, chosen)
        layer = QuantizedLayer(product.kernel, operand)
        return LayerCalibration(self._error(layer), outliers, *chosen, layer)

    def _error(self, layer: QuantizedLayer) -> float:
        """Return the error of a layer in int8, relative to its output."""
        lost = total = 0.0
        for x, exact in self._rows:
            # the logits of tokens that are never chosen
            never = exact.isneginf()
            lost += float((layer.run(x) - exact).masked_fill_(never, 0).square_().sum())
            total += float(exact.masked_fill(never, 0).square_().sum())
        return float((lost / max(total, 1e-30)) ** 0.5)


def calibrate_layers(
    programs: Sequence[Program],
    run: Run,
    bits: WeightBits = 8,
    on_progress: OnProgress = lambda *_: None,
    *,
    batches: int = 1,
    cores: int = 1,
) -> dict[LayerKey, LayerCalibration]:
    """Return outliers, codes and error of each layer, for inputs of these texts.

    A layer gets the inputs that it has in fp32, so errors of earlier layers do not count.

    Args:
        programs: programs in fp32 on the CPU.
        run: runs them over texts.
        on_progress: function to call for each layer.
        batches: number of batches of the texts.
        cores: number of threads that choose codes.
    """
    weights = linear_weights(programs)
    ops = (op for program in programs for op in program.ops if op.kernel == "linear")
    uses = Counter(layer_key(*op.operands[1:]) for op in ops)
    free, found = Semaphore(cores), dict[LayerKey, Future[LayerCalibration]]()
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as threads:

        def observe(weight: Tensor, x: Tensor, bias: Tensor | None, exact: Tensor) -> None:
            key = layer_key(weight, bias)
            layer = layers.get(key)
            if layer is None:
                return
            layer.keep_rows(x, exact)
            layer.left -= 1
            if layer.left:
                layer.add(x)
                return
            # which bounds the memory of inputs
            free.acquire()
            found[key] = threads.submit(layer.calibrate, x.clone(), bits)
            found[key].add_done_callback(lambda _: free.release())
            del layers[key]
            on_progress("choosing codes of layers", len(found), len(weights))

        columns = {key: len(weight) for key, (weight, _) in weights.items()}
        for group in _groups(columns) if batches > 1 else [[*weights]]:
            layers = {key: _Layer(*weights[key], batches * uses[key]) for key in group}
            run(ObservingKernels(observe))
        return {key: found[key].result() for key in weights}


def _groups(columns: Mapping[LayerKey, int]) -> list[list[LayerKey]]:
    """Divide layers into groups whose sums of products fit into memory.

    Args:
        columns: number of columns of each layer's input.
    """
    groups: list[list[LayerKey]] = []
    room = 0
    for key, number in columns.items():
        size = number * min(number, _TOGETHER)
        if not groups or size > room:
            groups.append([])
            room = _MOST_SUMS
        groups[-1].append(key)
        room -= size
    return groups
