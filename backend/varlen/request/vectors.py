"""Forms of embeddings that a request may ask for: fewer features, and smaller data types.

They are made of an engine's fp32 vectors on their way out, so all of them share batches and cached outputs.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.parameter import check_count
from varlen.request.request import Float32Array

VectorDType: TypeAlias = Literal["float32", "float16", "int8", "binary", "ubinary"]
VECTOR_DTYPES: tuple[VectorDType, ...] = get_args(VectorDType)

# Features in a byte of `binary` and `ubinary`.
_BITS = 8
_LARGEST_INT8 = 127
# Smallest divisor of a vector, as in torch.nn.functional.normalize.
_FLOOR = 1e-12


@dataclass(frozen=True, slots=True)
class VectorForm:
    """The form of the embeddings of a request.

    Attributes:
        dimensions: features from the first; None is all.
        normalize: whether vectors have length 1, also with fewer features.
        dtype: `float16` rounds. `int8` is 127 · x / the largest |x| of the vector, rounded, so cosines stay the
            same up to rounding. `ubinary` packs the signs of 8 features in a byte, the first in the highest bit, as
            uint8; `binary` is the same minus 128, as int8.

    Source: Kusupati et al. 2022, arXiv:2205.13147 (dimensions); binary and ubinary follow quantize_embeddings
    in sentence-transformers.
    """

    dimensions: int | None = None
    normalize: bool = False
    dtype: VectorDType = "float32"

    def check(self, size: int) -> None:
        """Raise RequestError unless vectors of `size` features have this form."""
        dimensions = size if self.dimensions is None else self.dimensions
        check_count("dimensions", dimensions, size)
        if self.dtype in ("binary", "ubinary") and dimensions % _BITS:
            raise RequestError(
                f"output_dtype {self.dtype} packs {_BITS} features in a byte, and the vector has {dimensions};"
                f" send dimensions that are a multiple of {_BITS}"
            )

    def num_bytes(self, size: int) -> int:
        """Return the size of a vector of `size` features in this form, in bytes."""
        dimensions = self.dimensions or size
        match self.dtype:
            case "float32":
                return 4 * dimensions
            case "float16":
                return 2 * dimensions
            case "int8":
                return dimensions
            case "binary" | "ubinary":
                return dimensions // _BITS

    def of(self, vectors: Float32Array) -> npt.NDArray[Any]:
        """Return vectors in this form, a new array unless nothing changes.

        Args:
            vectors: `[rows, features]` fp32, normalized if `normalize`; `check` has passed for `features`.

        Returns:
            `[rows, dimensions]`, of `binary` and `ubinary` `[rows, dimensions / 8]`.
        """
        if self.dimensions is not None and self.dimensions < vectors.shape[1]:
            vectors = vectors[:, : self.dimensions].copy()
            if self.normalize:
                vectors = _normalized(vectors)
        match self.dtype:
            case "float32":
                return vectors
            case "float16":
                # larger numbers become infinity
                with np.errstate(over="ignore"):
                    return vectors.astype(np.float16)
            case "int8":
                return _int8(vectors)
            case "ubinary":
                return np.packbits(vectors > 0, axis=1)
            case "binary":
                return (np.packbits(vectors > 0, axis=1) ^ 0x80).view(np.int8)


def _normalized(vectors: Float32Array) -> Float32Array:
    # fp64: squares of fp32 overflow from 2e19 on
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    unit: Float32Array = (wide / np.maximum(lengths, _FLOOR)).astype(np.float32)
    return unit


def _int8(vectors: Float32Array) -> npt.NDArray[np.int8]:
    # fp64: a quotient of fp32 may round to the next integer, and 127 / x overflows for tiny x
    wide = vectors.astype(np.float64)
    largest = np.abs(wide).max(axis=1, keepdims=True)
    scaled = np.rint(_LARGEST_INT8 * wide / np.where(largest == 0, 1, largest))
    codes: npt.NDArray[np.int8] = scaled.astype(np.int8)
    return codes
