"""Calibration of int8, and the file that stores it with a checkpoint.

It says which columns stay in fp32, the error of each layer, and the quality of the whole model. `int8_model` computes
it, when a model is loaded or earlier.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from varlen.errors import CheckpointError
from varlen.execution.cpu.quality import Quality, check_number, read_quality
from varlen.execution.cpu.quantization import linear_weights
from varlen.program.program import Program
from varlen_kernels.reference.linear_int8 import OUTLIERS

FILE = "int8.json"
# To be increased when the columns are chosen in another way, or the file has other fields.
_VERSION = 2


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
                LayerCalibration(_checked_columns(each["outliers"]), check_number(each["error"]))
                for each in fields.pop("layers")
            ]
            quality = read_quality(fields.pop("quality"))
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


def weights_hash(programs: Sequence[Program]) -> str:
    """Return a hash of the first row of each linear layer's weight, in hexadecimal digits."""
    digest = hashlib.sha256()
    for weight, _ in linear_weights(programs).values():
        digest.update(weight[0].numpy().tobytes())
    return digest.hexdigest()


def _checked_columns(columns: Sequence[int]) -> tuple[int, ...]:
    are_columns = all(type(column) is int and column >= 0 for column in columns)
    if not are_columns or len(set(columns)) != OUTLIERS or sorted(columns) != list(columns):
        raise ValueError(f"outliers are {columns}; allowed: {OUTLIERS} ascending columns")
    return tuple(columns)
