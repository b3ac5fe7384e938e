"""Forms of answers: embeddings, terms of a vocabulary, and scores of classifiers.

Features and data types of embeddings are made of an engine's fp32 vectors on their way out, so all of them share
batches and cached outputs. Terms are sparse vectors, and the most likely tokens of masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.parameter import MAX_INT32, check_count, read_json, refuse
from varlen.request.request import MAX_TOP_K, Float32Array, Int32Array

VectorDType: TypeAlias = Literal["float32", "float16", "int8", "binary", "ubinary"]
VECTOR_DTYPES: tuple[VectorDType, ...] = get_args(VectorDType)

MAX_SPANS = 4096
SPANS_TEXT = (
    f"a list of 1 to {MAX_SPANS} spans [begin, end] in characters, as JSON in a request's parameter"
)

# Features in a byte of `binary` and `ubinary`.
_BITS = 8
_LARGEST_INT8 = 127
# Smallest divisor of a vector, as in torch.nn.functional.normalize.
_FLOOR = 1e-12
ScoreFunction: TypeAlias = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True)
class VectorForm:
    """The form of the embeddings of a request.

    Attributes:
        dimensions: features from the first; None is all.
        normalize: whether vectors have length 1, also with fewer features.
        dtype: `float16` rounds. `int8` is 127 · x / the largest |x| of the vector, rounded, so cosines stay the
            same up to rounding. `ubinary` packs the signs of 8 features in a byte, the first in the highest bit, as
            uint8; `binary` is the same minus 128, as int8.
        is_rounded: whether vectors have whole numbers up to 127, as pplx-embed gives them. Unless they are normalized,
            `int8` has these. A 0 that was rounded up from below is -0, whose sign counts.

    Source: Kusupati et al. 2022, arXiv:2205.13147 (dimensions); binary and ubinary follow quantize_embeddings
    in sentence-transformers.
    """

    dimensions: int | None = None
    normalize: bool = False
    dtype: VectorDType = "float32"
    is_rounded: bool = False

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
                vectors = normalized(vectors)
        match self.dtype:
            case "float32":
                return vectors
            case "float16":
                # larger numbers become infinity
                with np.errstate(over="ignore"):
                    return vectors.astype(np.float16)
            case "int8" if self.is_rounded and not self.normalize:
                return vectors.astype(np.int8)
            case "int8":
                return _int8(vectors)
            case "ubinary":
                return self._bits(vectors)
            case "binary":
                return (self._bits(vectors) ^ 0x80).view(np.int8)

    def _bits(self, vectors: Float32Array) -> npt.NDArray[np.uint8]:
        """Return the signs of 8 features in a byte."""
        signs = ~np.signbit(vectors) if self.is_rounded else vectors > 0
        return np.packbits(signs, axis=1)


def read_spans(value: object) -> tuple[int, ...]:
    """Return beginning and end of each span of a request, one after the other.

    Raises:
        RequestError: this is no list of spans.
    """
    given = read_json("spans", value) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= MAX_SPANS:
        refuse("spans", value, SPANS_TEXT)
    for number, span in enumerate(given):
        if not _is_span(span):
            refuse(f"spans[{number}]", span, "[begin, end] in characters, 0 <= begin < end")
    return tuple(int(place) for span in given for place in span)


def _is_span(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    are_whole = all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    return are_whole and 0 <= value[0] < value[1] <= MAX_INT32


def normalized(vectors: npt.NDArray[Any]) -> Float32Array:
    """Return vectors divided by their lengths, `[rows, features]` fp32."""
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


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The terms of a text whose weight is not 0, the largest weight first.

    Attributes:
        indices: `[terms]` int32, numbers of terms: token ids.
        values: `[terms]` fp32, their weights: positive, or as a table of queries has them.
    """

    indices: Int32Array
    values: Float32Array


def terms_in_order(terms: npt.NDArray[np.integer[Any]], weights: Float32Array) -> Float32Array:
    """Return the row of the engine for terms, the largest weight first, `[terms, 2]` fp32.

    fp32 holds the number of a term exactly up to 2**24. Among equal weights, the lower number comes first.

    Args:
        terms: `[terms]`, their numbers, ascending.
        weights: `[terms]`; a negative one is as large as without its sign.
    """
    order = np.argsort(-np.abs(weights), kind="stable")
    rows: Float32Array = np.stack(
        (terms[order], weights[order]), axis=1, dtype=np.float32, casting="unsafe"
    )
    return rows


def sparse_vector(row: Float32Array, max_active_dims: int | None = None) -> SparseVector:
    """Return the vector of a row of the engine.

    Args:
        row: `[terms, 2]` fp32, numbers and weights of terms.
        max_active_dims: number of largest weights to keep; None keeps all.
    """
    row = row[:max_active_dims]
    return SparseVector(row[:, 0].astype(np.int32), row[:, 1].copy())


def sparse_tensors(
    vectors: Sequence[SparseVector], term_text: Callable[[int], str] | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of all vectors by name, `[vectors, most terms]`, with zeros behind their terms.

    There is room for one term at least: some clients cannot read a tensor without elements.

    Args:
        term_text: returns the text of a term; None leaves the texts out.
    """
    counts = [len(vector.indices) for vector in vectors]
    shape = len(vectors), max(1, *counts)
    indices, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, vector in enumerate(vectors):
        indices[row, : counts[row]] = vector.indices
        values[row, : counts[row]] = vector.values
    tensors: dict[str, npt.NDArray[Any]] = {
        "indices": indices,
        "values": values,
        "num_terms": np.array(counts, np.int32)[:, None],
    }
    if term_text is not None:
        tensors["terms"] = np.full(shape, b"", dtype=np.object_)
        for texts, vector in zip(tensors["terms"], vectors, strict=True):
            texts[: len(vector.indices)] = [
                term_text(term).encode() for term in vector.indices.tolist()
            ]
    return tensors


DEFAULT_TOP_K = 5


@dataclass(frozen=True, slots=True)
class FilledToken:
    """A token that may take the place of a mask; its score is a probability."""

    token_id: int
    text: str
    score: float


def largest_top_k(vocabulary: int) -> int:
    """Return the largest allowed `top_k` for a vocabulary size."""
    return min(MAX_TOP_K, vocabulary)


def mask_tensors(
    rows: Sequence[Float32Array], top_k: int, token_text: Callable[[int], str] | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of all rows by name, `[rows, most masks, top_k]`, with zeros behind their masks.

    Args:
        rows: `[masks, 2, tokens]` fp32 each, numbers and probabilities of tokens, the most likely first.
        token_text: returns the text of a token; None leaves the texts out.
    """
    counts = [len(row) for row in rows]
    filled = np.zeros((len(rows), max(counts), 2, top_k), np.float32)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = row[:, :, :top_k]
    token_ids = filled[:, :, 0].astype(np.int32)
    tensors: dict[str, npt.NDArray[Any]] = {
        "token_ids": token_ids,
        "scores": filled[:, :, 1].copy(),
        "num_masks": np.array(counts, np.int32)[:, None],
    }
    if token_text is not None:
        tensors["tokens"] = np.full(token_ids.shape, b"", dtype=np.object_)
        for texts, ids, count in zip(tensors["tokens"], token_ids, counts, strict=True):
            texts[:count] = [
                [token_text(token).encode() for token in mask] for mask in ids[:count].tolist()
            ]
    return tensors


def scores_of(logits: Float32Array, function: ScoreFunction) -> Float32Array:
    """Return the scores of logits, `[..., labels]` fp32; `none` returns the logits.

    They are computed in fp64 and rounded once; see docs/decisions/0079-scores-to-the-last-digit.md.
    """
    if function == "none":
        return logits
    wide = logits.astype(np.float64)
    if function == "softmax":
        exponentials = np.exp(wide - wide.max(axis=-1, keepdims=True))
        scores = exponentials / exponentials.sum(axis=-1, keepdims=True)
    else:
        # the exponent is never positive, so nothing overflows
        exponentials = np.exp(-np.abs(wide))
        scores = np.where(wide < 0, exponentials, 1) / (1 + exponentials)
    rounded: Float32Array = scores.astype(np.float32)
    return rounded
