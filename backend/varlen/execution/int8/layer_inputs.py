"""Codes and errors of linear layers, from the inputs that they have in fp32.

The model runs over a few texts in one batch. As soon as a layer has run, its codes are chosen in another thread, so a
core runs the model and the others choose. Texts that need several batches are run once for each group of layers whose
sums fit into memory.

The nearest codes make the smallest error of each weight. The error of a layer's output is smaller if later columns
correct the error of earlier ones, which they can where the inputs of both go together.
Source: LDLQ, Chee et al. 2023, arXiv:2307.13304, section 3; the same codes as GPTQ, Frantar et al. 2022,
arXiv:2210.17323, without an inverse. Columns with large inputs come first, as with GPTQ's `act_order`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from varlen.program.program import Program
from varlen_kernels import cpu
from varlen_kernels.reference.linear_int8 import (
    OUTLIERS,
    SMALLEST_SCALE,
    WeightCodes,
    largest_code,
    nearest_codes,
)

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
# Part of the mean of the gram matrix's diagonal, added to the diagonal: inputs of calibration are a sample.
_DAMPING = 0.01
# Fewer columns of the input are corrected one by one, and halves of more in one product.
_BLOCK = 16
# Output features at a time, which bounds the memory.
_FEATURES = 4096
# Candidates for the scale of codes of 4 bits, by the scale of the nearest codes: smaller ones cut the largest weights.
_SCALES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)

# The difference of a widened weight from a scale times its code, by the largest weight: a few roundings of fp32.
_ROUNDINGS = 2.0**-21
# Columns of the input by which most other weights are told.
_SAMPLE = 64


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


def rounded_codes(
    weight: Tensor, outliers: Tensor, grams: Sequence[Tensor], bits: WeightBits = 8
) -> WeightCodes:
    """Return codes for `quantize_weight`.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, columns of the input that get no codes.
        grams: sums over tokens of the products of two columns of the input: a matrix for each part of the columns,
            whose errors are corrected together. Columns whose sums are not finite get the nearest codes.
    """
    is_kept = torch.ones(len(weight), dtype=torch.bool).index_fill(0, outliers, value=False)
    scale, codes = nearest_codes(weight, outliers, bits)
    if bits == 4:
        # too few for the largest weights of a feature and for the others
        sizes = torch.cat([gram.diagonal() for gram in grams]) * is_kept
        for part in _features(weight):
            scale[part] = _best_scale(weight[:, part], scale[part], sizes, bits)
    first = 0
    for gram in grams:
        columns = is_kept[first : first + len(gram)].nonzero()[:, 0]
        columns = columns[gram.diagonal()[columns].argsort(descending=True)]
        feedback = _feedback(gram, columns)
        if feedback is not None:
            columns += first
            for part in _features(weight):
                codes[columns, part] = _codes(weight[columns, part], scale[part], feedback, bits)
        first += len(gram)
    return WeightCodes(scale, codes)


def stored_codes(weight: Tensor, outliers: Tensor, bits: WeightBits = 8) -> WeightCodes | None:
    """Return the codes that a weight was widened from; None for other weights.

    A quantized checkpoint with a scale for each output and no zero points has them: each feature is a scale times whole
    numbers, and the largest number uses all bits, or nearly all.

    Args:
        weight: `[hidden, features]` fp32.
        outliers: `[OUTLIERS]` int64, columns of the input that get code 0.
    """
    most, largest = largest_code(bits), weight.abs().amax(0).clamp_min(SMALLEST_SCALE)
    candidates = torch.stack([largest / code for code in (most + 1, most, most - 1)])
    # a part tells at once that most weights are none
    some = weight[:_SAMPLE]
    differences = [((some / each).round_() * each - some).abs().amax(0) for each in candidates]
    difference, best = torch.stack(differences).min(0)
    if (difference > _ROUNDINGS * largest).any():
        return None
    scale = candidates.gather(0, best[None])[0]
    codes = torch.empty_like(weight, dtype=torch.int8)
    for part in _features(weight):
        found = (weight[:, part] / scale[part]).round_()
        lost = (found * scale[part] - weight[:, part]).abs_()
        if found.max() > most or (lost > _ROUNDINGS * largest[part]).any():
            return None
        codes[:, part] = found.to(torch.int8)
    return WeightCodes(scale, codes.index_fill_(0, outliers, 0))


def _features(weight: Tensor) -> Iterator[slice]:
    for first in range(0, weight.shape[1], _FEATURES):
        yield slice(first, first + _FEATURES)


def _best_scale(weight: Tensor, scale: Tensor, sizes: Tensor, bits: WeightBits) -> Tensor:
    """Return the scale of each feature whose nearest codes have the smallest error.

    Args:
        weight: `[hidden, features]` fp32.
        scale: `[features]` fp32.
        sizes: `[hidden]`, mean squares of the columns of the input, in any unit.
    """
    largest = largest_code(bits)
    candidates = [scale * factor for factor in _SCALES]
    errors = [
        sizes @ ((weight / each).round_().clamp_(-largest, largest) * each - weight).square_()
        for each in candidates
    ]
    best = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(candidates).gather(0, best)[0]


def _feedback(gram: Tensor, columns: Tensor) -> Tensor | None:
    """Return the share of a column's error that each later column corrects.

    The gram matrix is U D U' with a diagonal D and this upper triangle U, whose diagonal is 1.

    Args:
        columns: order of its columns.

    Returns:
        `[columns, columns]` fp32; None if the gram matrix is not finite.
    """
    mean = gram.diagonal()[columns].double().mean()
    # from the last column to the first, the lower triangle becomes the upper one
    backwards = columns.flip(0)
    gram = gram[backwards][:, backwards].double()
    gram.diagonal().add_(_DAMPING * mean + torch.finfo(torch.float32).tiny)
    lower, failed = torch.linalg.cholesky_ex(gram)
    return None if failed else lower.div_(lower.diagonal().clone()).float().flip(0, 1)


def _codes(weight: Tensor, scale: Tensor, feedback: Tensor, bits: WeightBits) -> Tensor:
    """Return the codes of a weight, column of the input by column.

    Args:
        weight: `[hidden, features]` fp32.
        scale: `[features]` fp32.
        feedback: `[hidden, hidden]` fp32.
    """
    exact = weight / scale
    codes = torch.empty_like(exact)
    _choose(exact.clone(), exact, codes, feedback, largest_code(bits))
    return codes.to(torch.int8)


def _choose(goals: Tensor, exact: Tensor, codes: Tensor, feedback: Tensor, largest: int) -> None:
    """Choose codes of columns; each goal becomes the error of its code.

    Args:
        goals, exact: `[hidden, features]` fp32, in steps of a code.
    """
    half = len(goals) // 2
    if half >= _BLOCK:
        _choose(goals[:half], exact[:half], codes[:half], feedback[:half, :half], largest)
        goals[half:].addmm_(feedback[:half, half:].t(), goals[:half])
        _choose(goals[half:], exact[half:], codes[half:], feedback[half:, half:], largest)
        return
    rows = zip(goals, exact, codes, feedback, strict=True)
    # results go where they stay: a call of torch takes as long as its work
    for after, (goal, weight, code, shares) in enumerate(rows, 1):
        torch.round(goal, out=code).clamp_(-largest, largest)
        torch.sub(weight, code, out=goal)
        goals[after:].addr_(shares[after:], goal)
