"""Calibration of int8, and the file that stores it with a checkpoint.

It has the columns that stay in fp32 and the codes of each layer, its error, and the quality of the whole model.
`int8_model` computes it, when a model is loaded or earlier.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from varlen.errors import CheckpointError
from varlen.execution.int8.quality import Quality, check_number, read_quality
from varlen.execution.int8.quantization import WeightBits, linear_weights
from varlen.program.program import Program
from varlen_kernels.reference.linear_int8 import OUTLIERS

# To be increased when codes are chosen in another way, or the file has other fields.
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
    """

    error: float
    outliers: Tensor = field(compare=False)
    scale: Tensor = field(compare=False)
    codes: Tensor = field(compare=False)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What int8 needs to know about a checkpoint.

    Attributes:
        checkpoint: hash of the checkpoint's architecture, see `fingerprint.checkpoint_hash`.
        weights: hash of the weights, see `weights_hash`.
        levels: largest code of a token on the CPU that measured errors and quality.
        layers: the linear layers of the model, in the order in which its programs have them.
        quality: quality of the whole model.
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
