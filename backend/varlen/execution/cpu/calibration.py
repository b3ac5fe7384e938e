"""Calibration of int8: columns that stay in fp32, error of each layer, quality.

The fp32 encoder runs over a few texts twice: once for the largest value of each column of each linear layer's input,
once for the error of each layer in int8. Then other texts measure how close int8 vectors are to fp32 vectors. The
result is stored with the checkpoint, or computed when the model is loaded.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.errors import CheckpointError
from varlen.execution.cpu.quantization import LayerKey, QuantizedLayer, layer_key, linear_weights
from varlen.execution.packing import dims_of, largest_dims, packed_batch
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.layout import Layout
from varlen.program.program import Program
from varlen.request.request import DEFAULT_OPTIONS, Prompt
from varlen_kernels import cpu
from varlen_kernels.reference.linear_int8 import OUTLIERS

FILE = "int8.json"
# To be increased when the columns are chosen in another way, or the file has other fields.
_VERSION = 2
_CPU = torch.device("cpu")

Observe = Callable[[Tensor, Tensor, Tensor | None], None]


@dataclass(frozen=True, slots=True)
class LayerCalibration:
    """One linear layer.

    Attributes:
        outliers: columns of its input that stay in fp32, ascending.
        error: error of its output in int8, relative to the output (root mean squares).
    """

    outliers: tuple[int, ...]
    error: float


@dataclass(frozen=True, slots=True)
class Quality:
    """How close int8 vectors are to fp32 vectors of the same texts.

    Attributes:
        texts: number of texts.
        cosine_mean, cosine_min: cosine of the two vectors of a text.
        spearman: rank correlation of the similarities of all pairs of texts.
    """

    texts: int
    cosine_mean: float
    cosine_min: float
    spearman: float

    def __str__(self) -> str:
        return (
            f"cosine to fp32 {self.cosine_mean:.4f} on average and {self.cosine_min:.4f} at least, Spearman"
            f" {self.spearman:.4f} ({self.texts} texts)"
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """What int8 needs to know about a checkpoint.

    Attributes:
        checkpoint: hash of the checkpoint's architecture, see `fingerprint.checkpoint_hash`.
        weights: hash of the weights, see `weights_hash`.
        levels: largest code of a token on the CPU that measured errors and quality.
        layers: the linear layers of the encoder, in the order in which they run.
        quality: quality of the whole encoder.
    """

    checkpoint: str
    weights: str
    levels: int
    layers: tuple[LayerCalibration, ...]
    quality: Quality

    def save(self, folder: Path, name: str = FILE) -> Path:
        """Write the file into a folder and return its path.

        Raises:
            OSError: the folder cannot be written.
        """
        path = folder / name
        # a model that is loaded meanwhile reads the old file or the new one
        temporary = folder / f".{name}.{os.getpid()}"
        try:
            temporary.write_text(json.dumps({"version": _VERSION, **asdict(self)}, indent=1) + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, folder: Path, name: str = FILE) -> "Calibration | None":
        """Return the calibration stored in a folder, if it has this version.

        Raises:
            CheckpointError: the file is damaged.
        """
        try:
            fields = json.loads((folder / name).read_text())
            if fields.pop("version") != _VERSION:
                return None
            layers = [
                LayerCalibration(_checked_columns(each["outliers"]), _checked(each["error"]))
                for each in fields.pop("layers")
            ]
            quality = Quality(**fields.pop("quality"))
            for number in asdict(quality).values():
                _checked(number)
            return cls(layers=tuple(layers), quality=quality, **fields)
        except FileNotFoundError:
            return None
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{name} cannot be read: {error!r}; remove it, or write it again with"
                " `python -m varlen_tools.quantize`"
            ) from None


class ObservingKernels:
    """Ops of CPUs that show the weight, input and bias of linear layers."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe

    def __getattr__(self, name: str) -> object:
        return getattr(cpu, name)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return `reference.linear`."""
        self._observe(weight, x, bias)
        return cpu.linear(x, weight, bias, out=out)


def find_outliers(program: Program, prompts: Sequence[Prompt]) -> dict[LayerKey, Tensor]:
    """Return the columns of each layer's input with the largest values.

    Args:
        program: an encoder in fp32 on the CPU.
        prompts: one or more prompts.

    Returns:
        `[OUTLIERS]` int64, ascending, of each layer.
    """
    largest: dict[LayerKey, Tensor] = {}

    def observe(weight: Tensor, x: Tensor, bias: Tensor | None) -> None:
        key, most = layer_key(weight, bias), x.abs().amax(0)
        largest[key] = torch.maximum(largest[key], most) if key in largest else most

    run_prompts(program, ObservingKernels(observe), prompts)
    return {
        key: largest[key].topk(OUTLIERS).indices.sort().values for key in linear_weights(program)
    }


def measure_errors(
    program: Program, prompts: Sequence[Prompt], layers: Mapping[LayerKey, QuantizedLayer]
) -> dict[LayerKey, float]:
    """Return the relative error of each layer in int8.

    A layer gets the inputs that it has in fp32, so errors of earlier layers do not count.
    """
    squares = {key: np.zeros(2) for key in layers}

    def observe(weight: Tensor, x: Tensor, bias: Tensor | None) -> None:
        key = layer_key(weight, bias)
        if layer := layers.get(key):
            exact = cpu.linear(x, weight, bias)
            difference = layer.run(x) - exact
            squares[key] += [float(difference.square().sum()), float(exact.square().sum())]

    run_prompts(program, ObservingKernels(observe), prompts)
    return {
        key: float(np.sqrt(error / max(total, 1e-30))) for key, (error, total) in squares.items()
    }


@torch.inference_mode()
def run_prompts(
    program: Program, kernels: object, prompts: Sequence[Prompt]
) -> npt.NDArray[np.float32]:
    """Return the vector of each prompt, `[prompts, hidden]`; they run one by one.

    Args:
        program: has one output per sequence.
        kernels: the functions that its ops name.
        prompts: one or more prompts.
    """
    longest = max(prompt.num_tokens for prompt in prompts)
    layout = Layout(program.buffers, alignment_of(_CPU))
    arena = Arena(layout, {**largest_dims(longest), "sequences": 1}, _CPU)
    vectors = []
    for prompt in prompts:
        dims = dims_of([prompt.num_tokens])
        batch = packed_batch(program.inputs, dims, [prompt], [DEFAULT_OPTIONS])
        (output,) = program.run(batch, kernels, arena.allocate(dims))
        vectors.append(output[0].numpy())
    return np.stack(vectors)


def weights_hash(program: Program) -> str:
    """Return a hash of the first row of each linear layer's weight, in hexadecimal digits."""
    digest = hashlib.sha256()
    for weight, _ in linear_weights(program).values():
        digest.update(weight[0].numpy().tobytes())
    return digest.hexdigest()


def compare(vectors: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> Quality:
    """Return the quality of vectors, `[texts, hidden]`; at least three texts."""
    ours, theirs = _normalized(vectors), _normalized(expected)
    cosines = (ours * theirs).sum(1)
    pairs = np.triu_indices(len(ours), 1)
    similarities = [(each @ each.T)[pairs] for each in (ours, theirs)]
    ranks = np.stack([each.argsort().argsort() for each in similarities])
    return Quality(
        len(ours),
        float(cosines.mean()),
        float(cosines.min()),
        float(np.corrcoef(ranks)[0, 1]),
    )


def _normalized(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    exact = vectors.astype(np.float64)
    normalized: npt.NDArray[np.float64] = exact / np.linalg.norm(exact, axis=1, keepdims=True)
    return normalized


def _checked_columns(columns: Sequence[int]) -> tuple[int, ...]:
    are_columns = all(type(column) is int and column >= 0 for column in columns)
    if not are_columns or len(set(columns)) != OUTLIERS or sorted(columns) != list(columns):
        raise ValueError(f"outliers are {columns}; allowed: {OUTLIERS} ascending columns")
    return tuple(columns)


def _checked(number: float) -> float:
    if type(number) not in (int, float) or not math.isfinite(number):
        raise ValueError(f"{number!r} is not a finite number")
    return float(number)
