"""The outputs of row calls: what a method requests, and the check of what comes.

A method needs one output or several of a request; each has a row per row of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_client.errors import InvalidRequest, ServerError
from varlen_client.wire import ModelInfo

Vectors: TypeAlias = npt.NDArray[Any]
OutputDType: TypeAlias = Literal["float32", "float16", "int8", "binary", "ubinary"]
Activation: TypeAlias = Literal["auto", "softmax", "sigmoid", "none"]
TruncationSide: TypeAlias = Literal["right", "left"]

_NUMPY_DTYPES: Mapping[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": np.int8,
    "binary": np.int8,
    "ubinary": np.uint8,
}
# The last dimension of an output whose rows decide it.
ANY_WIDTH = -1
# Features in an element of `binary` and `ubinary`.
_BITS = 8


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label of a classifier and its score for a row."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class RowOutput:
    """One requested output.

    Attributes:
        name: of the tensor.
        rank: its dimensions, without that of the rows.
        dtype: of its elements; object for strings.
        width: its last dimension; None takes that of the model's config, where -1 is any.
        packs: features in one element.
    """

    name: str
    rank: int = 1
    dtype: type[np.generic] = np.float32
    width: int | None = None
    packs: int = 1

    def of_model(self, method: str, info: ModelInfo) -> RowOutput:
        """Return this output with its width.

        Raises:
            InvalidRequest: the model does not have it.
        """
        width = info.width(method, self.name, rank=self.rank)
        width = width if self.width is None else self.width
        return replace(self, width=width if width == ANY_WIDTH else -(-width // self.packs))

    def checked(self, array: npt.NDArray[Any] | None, rows: int) -> npt.NDArray[Any]:
        """Return an array if it has the expected shape and dtype.

        Raises:
            ServerError: it is missing, or has another shape or dtype.
        """
        if not isinstance(array, np.ndarray):
            raise ServerError(f"the response has no output {self.name}")
        width = array.shape[-1] if self.width == ANY_WIDTH else self.width
        fits = array.ndim == self.rank + 1 and (array.shape[0], array.shape[-1]) == (rows, width)
        if not fits or array.dtype != self.dtype:
            raise ServerError(
                f"{self.name} is {array.dtype} {list(array.shape)}; expected"
                f" {np.dtype(self.dtype).name} with {rows} rows of {self.width} values in"
                f" {self.rank + 1} dimensions"
            )
        return array


_TOKEN_COUNTS = RowOutput("num_tokens", dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RowTask:
    """What a method requests for each row.

    Attributes:
        method: the client's method, for errors.
        outputs: the requested ones.
        needs_width: width of the first, if only one is served.
    """

    method: str
    outputs: tuple[RowOutput, ...]
    needs_width: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(output.name for output in self.outputs)

    @property
    def counts_tokens(self) -> bool:
        """Whether the last output is the number of tokens of each row."""
        return self.outputs[-1].name == _TOKEN_COUNTS.name

    def counting_tokens(self, info: ModelInfo) -> RowTask:
        """Return this task with the output `num_tokens` at the end, if the model has it."""
        if _TOKEN_COUNTS.name not in info.outputs:
            return self
        return replace(self, outputs=(*self.outputs, _TOKEN_COUNTS))

    def of_model(self, info: ModelInfo) -> RowTask:
        """Return this task with the widths of a model.

        Raises:
            InvalidRequest: the model does not serve it.
        """
        outputs = tuple(output.of_model(self.method, info) for output in self.outputs)
        if self.needs_width not in (None, outputs[0].width):
            raise InvalidRequest(
                f"model {info.name!r} gives {outputs[0].width} values per row; "
                f"{self.method} needs {self.needs_width}"
            )
        return replace(self, outputs=outputs)

    def checked(
        self, arrays: Mapping[str, npt.NDArray[Any] | None], rows: int
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return the outputs of a response, in their order; see `RowOutput.checked`."""
        return tuple(output.checked(arrays.get(output.name), rows) for output in self.outputs)

    def joined(self, answers: list[tuple[npt.NDArray[Any], ...]]) -> tuple[npt.NDArray[Any], ...]:
        """Return the outputs of all requests, in arrays of all rows."""
        if not answers:
            return tuple(
                np.empty((0, max(each.width or 0, 0)), each.dtype) for each in self.outputs
            )
        return tuple(np.concatenate(arrays) for arrays in zip(*answers, strict=True))


def vector_output(dimensions: int | None, dtype: OutputDType | None) -> RowOutput:
    """Return the output of `embed`.

    Raises:
        InvalidRequest: there is no such dtype.
    """
    if dtype is not None and dtype not in _NUMPY_DTYPES:
        raise InvalidRequest(f"output_dtype is {dtype!r}; allowed: {', '.join(_NUMPY_DTYPES)}")
    packs = _BITS if dtype in ("binary", "ubinary") else 1
    numpy_dtype = _NUMPY_DTYPES[dtype or "float32"]
    return RowOutput("sentence_embedding", 1, numpy_dtype, dimensions, packs)


def best_labels(
    scores: npt.NDArray[np.float32], labels: npt.NDArray[np.object_], top_k: int | None
) -> list[list[LabelScore]]:
    """Return the labels of each row with their scores, the best first.

    Args:
        scores, labels: `[rows, labels]`, strings as bytes.
        top_k: labels of a row; None is all.
    """
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return [
        [
            LabelScore(labels[row, at].decode(errors="replace"), float(scores[row, at]))
            for at in best
        ]
        for row, best in enumerate(order)
    ]
