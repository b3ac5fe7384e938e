"""Linear layers in int8: calibration, its file beside a checkpoint, and quality beside fp32.

A quantized program has the same ops with quantized weights.
docs/operating/int8.md describes the arithmetic and its quality. For a GPU, the host loads weights, and the GPU makes
their codes, layer by layer (docs/decisions/0128-codes-on-a-gpu.md).
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from varlen.errors import CheckpointError
from varlen.execution.cpu.linear_paths import fuse_layers
from varlen.program.program import Op, Operand, Program, Value
from varlen_kernels import cpu
from varlen_kernels.op_table import OPS
from varlen_kernels.reference.linear_int8 import (
    OUTLIERS,
    SMALLEST_SCALE,
    Int8Weight,
    nearest_codes,
)
from varlen_kernels.reference.linear_layers import CodedWeight, LinearWeight

if TYPE_CHECKING:
    from varlen_kernels.cpu.int8_products import Int8Product

_log = logging.getLogger(__name__)

# Bits of a code of a weight. The codes of a token have as many as the CPU multiplies exactly.
WeightBits: TypeAlias = Literal[8, 4]
# By the setting `dtype`.
BITS: Mapping[str, WeightBits] = {"int8": 8, "int4": 4}

# Ops of linear layers as they are recorded.
LINEAR = "linear", "linear_activate"

# Ids of a layer's weight and bias.
LayerKey: TypeAlias = tuple[int, int]
# Form of codes.
Codes: TypeAlias = Literal["int8", "fp8"]
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
# A lower mean cosine to fp32 is worth a warning, and so is a higher mean KL divergence.
LEAST_COSINE = 0.99
LARGEST_KL = 0.05


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A linear layer in int8, for the product that is fastest on this CPU.

    Attributes:
        weight: the op's operand after the input.
    """

    kernel: str
    weight: Int8Weight

    def run(self, x: Tensor) -> Tensor:
        """Return its output, `[tokens, features]`, for `[tokens, hidden]` of the same dtype."""
        result: Tensor = getattr(cpu, self.kernel)(x, self.weight)
        return result


def layer_key(weight: object, bias: object) -> LayerKey:
    """Return the key of a linear layer; layers may share a weight."""
    return id(weight), id(bias)


def linear_weights(programs: Sequence[Program]) -> dict[LayerKey, tuple[Tensor, Tensor | None]]:
    """Return weight and bias of linear layers, in order."""
    layers = {}
    for op in (op for program in programs for op in program.ops):
        if op.kernel in LINEAR:
            _, weight, bias = op.operands
            assert isinstance(weight, Tensor)
            assert bias is None or isinstance(bias, Tensor)
            # besides its outliers, a token needs one more column
            if weight.shape[0] > OUTLIERS:
                layers[layer_key(weight, bias)] = weight, bias
    return layers


def product_of(bits: WeightBits) -> "Int8Product":
    """Return the linear layer that runs weights with codes of this number of bits."""
    # its layout asks LLVM for the CPU, which a machine with a GPU may lack
    from varlen_kernels.cpu import int8_products

    return int8_products.int8_product(bits)


def use_int8(program: Program, layers: Mapping[LayerKey, QuantizedLayer]) -> Program:
    """Return the program with int8 layers, without the weights that they replace.

    Where the CPU's op can also do what follows a layer, it does.
    """

    def replaced(op: Op) -> Op:
        layer = layers.get(layer_key(*op.operands[1:])) if op.kernel == "linear" else None
        if layer is None:
            return op
        operands, row = (op.operands[0], layer.weight), OPS[layer.kernel]
        assert row.result is not None
        made = row.result(row.named(operands, {}))
        scratch = [
            Value(f"{op.results[0].name} {name}", tuple(shape), dtype)
            for name, (shape, dtype) in zip(row.results[1:], made[1:], strict=True)
        ]
        results = (*op.results, *scratch)
        return replace(op, kernel=layer.kernel, operands=operands, results=results)

    return fuse_layers(Program([replaced(op) for op in program.ops], program.outputs))


def coded_weight(weight: Tensor, codes: Codes) -> CodedWeight:
    """Return the nearest codes of a weight, `[hidden, features]`, with a scale for each feature.

    The largest weight of a feature has the largest code.
    """
    exact = weight.t().float().contiguous().t()
    if codes == "int8":
        scale, found = nearest_codes(exact, torch.empty(0, dtype=torch.int64, device=exact.device))
        return CodedWeight(found, scale)
    scale = (exact.abs().amax(0) / _LARGEST_FP8).clamp_min_(SMALLEST_SCALE)
    # rounding may leave more than the largest number
    found = (exact / scale).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    return CodedWeight(found, scale)


def to_codes(
    programs: Sequence[Program], codes: Codes, device: torch.device
) -> tuple[Program, ...]:
    """Return programs on a GPU with linear layers in codes; weights in fp32 stay.

    Args:
        programs: programs with weights in memory of the host.
    """
    # shared weights stay shared
    moved: dict[int, Any] = {}

    def move(operand: Any) -> Any:
        if isinstance(operand, tuple):
            return type(operand)(*map(move, operand))
        if not isinstance(operand, Tensor):
            return operand
        if id(operand) not in moved:
            moved[id(operand)] = operand.to(device)
        return moved[id(operand)]

    weights = {id(weight): weight for weight, _ in linear_weights(programs).values()}
    coded = {
        key: coded_weight(weight.to(device), codes)
        for key, weight in weights.items()
        if weight.itemsize == 2  # bytes
    }
    _log.info("%s: codes for the weights of %d linear layers", codes, len(coded))
    return tuple(use_codes(each, coded, move) for each in programs)


def use_codes(
    program: Program, coded: Mapping[int, LinearWeight], move: Callable[[Any], Any] = lambda x: x
) -> Program:
    """Return a program with other weights by id, and operands as `move` returns them."""

    def replaced(op: Op) -> Op:
        operands: list[Operand] = [*op.operands]
        if op.kernel in LINEAR:
            operands[1] = coded.get(id(operands[1]), operands[1])
        return replace(op, operands=tuple(map(move, operands)))

    return Program([replaced(op) for op in program.ops], program.outputs)


@dataclass(frozen=True, slots=True)
class VectorQuality:
    """How close int8 vectors are to fp32 vectors of the same texts.

    Attributes:
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

    @property
    def is_high(self) -> bool:
        """Whether int8 changes little; NaN is not high."""
        return self.cosine_mean >= LEAST_COSINE

    @property
    def rows(self) -> Mapping[str, str]:
        return {
            "cosine to fp32, mean": f"{self.cosine_mean:.4f}",
            "cosine to fp32, least": f"{self.cosine_min:.4f}",
            "Spearman of similarities": f"{self.spearman:.4f}",
            "texts": str(self.texts),
        }


@dataclass(frozen=True, slots=True)
class LogitQuality:
    """How close int8 logits are to fp32 logits of the same tokens.

    Attributes:
        kl_mean: Kullback-Leibler divergence of the int8 probabilities from fp32, in nats.
        same_best: part of the tokens with the same most probable next token.
    """

    texts: int
    tokens: int
    kl_mean: float
    same_best: float
    perplexity: float
    fp32_perplexity: float

    def __str__(self) -> str:
        return (
            f"KL divergence from fp32 {self.kl_mean:.5f}, the same best token {self.same_best:.1%} of the time,"
            f" perplexity {self.perplexity:.2f} instead of {self.fp32_perplexity:.2f} ({self.texts} texts)"
        )

    @property
    def is_high(self) -> bool:
        return self.kl_mean <= LARGEST_KL

    @property
    def rows(self) -> Mapping[str, str]:
        return {
            "KL divergence from fp32, mean": f"{self.kl_mean:.5f}",
            "same best token": f"{self.same_best:.2%}",
            "perplexity": f"{self.perplexity:.3f}",
            "perplexity in fp32": f"{self.fp32_perplexity:.3f}",
            "texts": str(self.texts),
        }


Quality: TypeAlias = VectorQuality | LogitQuality


def read_quality(stored: Mapping[str, float]) -> Quality:
    """Return the quality with these fields.

    Raises:
        ValueError: the fields or a value are wrong.
    """
    for kind in (VectorQuality, LogitQuality):
        if stored.keys() == {field.name for field in fields(kind)}:
            quality: Quality = kind(**stored)  # type: ignore[arg-type]
            for number in asdict(quality).values():
                check_number(number)
            return quality
    raise ValueError(f"quality has the fields {sorted(stored)}")


def check_number(number: float) -> float:
    """Return a finite number.

    Raises:
        ValueError: it is none.
    """
    if type(number) not in (int, float) or not math.isfinite(number):
        raise ValueError(f"{number!r} is not a finite number")
    return float(number)


def compare_vectors(
    vectors: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]
) -> VectorQuality:
    """Return the quality of vectors, `[texts, hidden]`; at least three texts."""
    ours, theirs = (
        each / np.linalg.norm(each, axis=1, keepdims=True)
        for each in (vectors.astype(np.float64), expected.astype(np.float64))
    )
    cosines = (ours * theirs).sum(1)
    pairs = np.triu_indices(len(ours), 1)
    similarities = [(each @ each.T)[pairs] for each in (ours, theirs)]
    ranks = np.stack([each.argsort().argsort() for each in similarities])
    return VectorQuality(
        len(ours),
        float(cosines.mean()),
        float(cosines.min()),
        float(np.corrcoef(ranks)[0, 1]),
    )


def compare_logits(texts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> LogitQuality:
    """Return the quality of logits.

    Args:
        texts: int8 logits and fp32 logits of each text, `[tokens, vocabulary]`, and its token ids, `[tokens]`.
    """
    sums = np.zeros(7)
    for logits, expected, token_ids in texts:
        ours, theirs = logits.log_softmax(1), expected.log_softmax(1)
        # a token that is never chosen adds nothing
        terms = (theirs.exp() * (theirs - ours)).masked_fill_(theirs.isneginf(), 0)
        following = token_ids[1:, None].long()
        sums += [
            1,
            len(ours),
            len(following),
            float(terms.sum()),
            int((ours.argmax(1) == theirs.argmax(1)).sum()),
            *(-float(each[:-1].gather(1, following).sum()) for each in (ours, theirs)),
        ]
    count, tokens, followed, divergence, same, *lost = sums.tolist()
    perplexities = np.exp(np.array(lost) / max(followed, 1)).tolist()
    rates = divergence / max(tokens, 1), same / max(tokens, 1)
    return LogitQuality(int(count), int(tokens), *rates, *perplexities)


# To be increased when the file has other fields, or stored codes are worse than new ones.
_VERSION = 3
# Name of the fields in the file's header.
_FIELDS = "calibration"
_PARTS = ("outliers", "scale", "codes")


def file_name(bits: WeightBits) -> str:
    """Return the name of the file that is stored with a checkpoint."""
    return f"int{bits}.safetensors"


@dataclass(frozen=True, slots=True)
class LayerCalibration:
    """One linear layer.

    Attributes:
        error: error of its output in int8, relative to the output (root mean squares).
        outliers: `[OUTLIERS]` int64, ascending columns of its input that stay in fp32.
        scale: `[features]` fp32, the value of one step of a code.
        codes: `[hidden, features]` int8, the codes of its weight.
        packed: the layer as it runs, if this process has measured the error.
    """

    error: float
    outliers: Tensor = field(compare=False)
    scale: Tensor = field(compare=False)
    codes: Tensor = field(compare=False)
    packed: QuantizedLayer | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What int8 needs to know about a checkpoint.

    Attributes:
        checkpoint: hash of the checkpoint's architecture, see `fingerprint.checkpoint_hash`.
        levels: largest code of a token on the CPU that measured errors and quality.
        layers: the linear layers of the model, in the order in which its programs have them.
    """

    checkpoint: str
    weights: str
    bits: WeightBits
    levels: int
    layers: tuple[LayerCalibration, ...]
    quality: Quality

    def save(self, folder: Path) -> Path:
        """Write the file into a checkpoint folder and return its path.

        Raises:
            OSError: the folder cannot be written.
        """
        path = folder / file_name(self.bits)
        # a model that is loaded meanwhile reads the old file or the new one
        temporary = folder / f".{path.name}.{os.getpid()}"
        try:
            self.write(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def write(self, path: Path) -> None:
        """Write a file.

        Raises:
            OSError: it cannot be written.
        """
        tensors = {
            f"{number}.{part}": getattr(layer, part).contiguous()
            for number, layer in enumerate(self.layers)
            for part in _PARTS
        }
        fields = {
            "version": _VERSION,
            "checkpoint": self.checkpoint,
            "weights": self.weights,
            "bits": self.bits,
            "levels": self.levels,
            "errors": [layer.error for layer in self.layers],
            "quality": asdict(self.quality),
            "tensors": _hash(tensors.values()),
        }
        try:
            save_file(tensors, path, {_FIELDS: json.dumps(fields)})
        except SafetensorError as error:
            raise OSError(str(error)) from None

    @classmethod
    def load(cls, folder: Path, name: str = file_name(8)) -> "Calibration | None":
        """Return the calibration stored in a folder, if it has this version.

        Raises:
            CheckpointError: the file is damaged.
        """
        try:
            with safe_open(folder / name, framework="pt") as file:
                fields = json.loads(file.metadata()[_FIELDS])
                if fields.pop("version") != _VERSION:
                    return None
                errors = [check_number(error) for error in fields.pop("errors")]
                parts = [
                    [file.get_tensor(f"{number}.{part}") for part in _PARTS]
                    for number in range(len(errors))
                ]
            if _hash(tensor for layer in parts for tensor in layer) != fields.pop("tensors"):
                raise ValueError("its tensors do not have its hash")
            layers = tuple(
                LayerCalibration(error, _checked_columns(outliers), scale, codes)
                for error, (outliers, scale, codes) in zip(errors, parts, strict=True)
            )
            quality = read_quality(fields.pop("quality"))
            return cls(layers=layers, quality=quality, **fields)
        except FileNotFoundError:
            return None
        except (
            SafetensorError,
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
                " `varlen quantize`"
            ) from None


def weights_hash(programs: Sequence[Program]) -> str:
    """Return a hash of the weights of all linear layers, in hexadecimal digits."""
    return _hash(weight for weight, _ in linear_weights(programs).values())


def _hash(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        # in the order of memory, without a copy
        array = tensor.numpy()
        rows = np.ascontiguousarray(array.T if array.flags.f_contiguous else array)
        digest.update(rows.data)
    return digest.hexdigest()


def _checked_columns(columns: Tensor) -> Tensor:
    is_ascending = bool((columns.diff() > 0).all())
    if (
        columns.shape != (OUTLIERS,)
        or columns.dtype != torch.int64
        or not is_ascending
        or columns[0] < 0
    ):
        raise ValueError(f"outliers are {columns.tolist()}; allowed: {OUTLIERS} ascending columns")
    return columns
