"""Outputs of row calls, their check, and what reads answers from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_client.errors import ServerError
from varlen_client.wire import Floats, ModelInfo

# One output of a request, with a row per row of the request.
Output: TypeAlias = npt.NDArray[Any]
Vectors: TypeAlias = npt.NDArray[Any]

# The last dimension of an output whose rows decide it.
ANY_WIDTH = -1


@dataclass(frozen=True, slots=True)
class RowOutput:
    """One requested output.

    Attributes:
        rank: number of its dimensions, without the rows.
        dtype: dtype of its elements; object for strings.
        width: its last dimension; None takes the one in the model's config, where -1 is any.
        packs: features in one element.
        other: its name with models that have no output `name`; empty for none.
        rows: number of its rows, where the request has another one.
    """

    name: str
    rank: int = 1
    dtype: type[np.generic] = np.float32
    width: int | None = None
    packs: int = 1
    other: str = ""
    rows: int | None = None

    def of_model(self, method: str, info: ModelInfo) -> RowOutput:
        """Return this output with the name and the width that the model has.

        Raises:
            InvalidRequest: the model does not have it.
        """
        is_other = self.name not in info.outputs and self.other in info.outputs
        name = self.other if is_other else self.name
        width = info.width(method, name, rank=self.rank)
        width = width if self.width is None else self.width
        return _renamed(self, name, width if width == ANY_WIDTH else -(-width // self.packs))

    def checked(self, array: Output | None, rows: int) -> Output:
        """Return an array if it has the expected shape and dtype.

        Raises:
            ServerError: it is missing, or has another shape or dtype.
        """
        if not isinstance(array, np.ndarray):
            raise ServerError(f"the response has no output {self.name}")
        rows = rows if self.rows is None else self.rows
        width = array.shape[-1] if self.width == ANY_WIDTH else self.width
        fits = array.ndim == self.rank + 1 and (array.shape[0], array.shape[-1]) == (rows, width)
        if not fits or array.dtype != self.dtype:
            raise ServerError(
                f"{self.name} is {array.dtype} {list(array.shape)}; expected"
                f" {np.dtype(self.dtype).name} with {rows} rows of {self.width} values in"
                f" {self.rank + 1} dimensions"
            )
        return array


@lru_cache(256)
def _renamed(output: RowOutput, name: str, width: int) -> RowOutput:
    return replace(output, name=name, width=width)


TOKEN_COUNTS = RowOutput("num_tokens", dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RowAnswers:
    """The outputs of all requests of a call.

    Attributes:
        outputs: requested outputs, with the widths of the model.
        requests: the checked outputs of each request, by name and in order.
    """

    outputs: tuple[RowOutput, ...]
    options: Mapping[str, Any]
    requests: Sequence[Mapping[str, Output]]

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens of all rows; None if it was not requested."""
        if all(output.name != TOKEN_COUNTS.name for output in self.outputs):
            return None
        return sum(int(request[TOKEN_COUNTS.name].sum()) for request in self.requests)

    def each(self, *names: str) -> Iterator[tuple[Output, ...]]:
        """Yield these outputs of each request, whose rows are padded."""
        for request in self.requests:
            yield tuple(request[name] for name in names)

    def joined(self, output: RowOutput) -> Output:
        """Return an output of all rows in one array, [rows, width]."""
        if not self.requests:
            return np.empty((0, max(output.width or 0, 0)), output.dtype)
        return np.concatenate([request[output.name] for request in self.requests])


def read_matrix(answers: RowAnswers) -> Output:
    """Return the first output, [rows, width]."""
    return answers.joined(answers.outputs[0])


def read_arrays(answers: RowAnswers) -> list[Floats]:
    """Return the first output of each request of one row, without the batch dimension."""
    return [output[0].copy() for (output,) in answers.each(answers.outputs[0].name)]


def text_of(text: bytes) -> str:
    """Return an element of an output of texts."""
    return text.decode(errors="replace")
