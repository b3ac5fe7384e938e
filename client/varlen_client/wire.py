"""The wire as the client sees it: rows to tensors, and what a model's config says about them.

One row is one sequence. Texts go as `text` BYTES [rows, 1]; pairs add `text_pair`. Token ids go as
`input_ids` INT64 [rows, longest] with an `attention_mask`; the server drops the padding on entry,
so rows of any lengths may share a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_client.errors import InvalidRequest, ModelNotFound, ServerError

Floats: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Inputs: TypeAlias = Sequence[str] | Sequence[TokenIds] | npt.NDArray[np.integer[Any]]
Pairs: TypeAlias = Sequence[tuple[str, str]]

Parameters: TypeAlias = Mapping[str, bool | int | float]

_Text: TypeAlias = tuple[bytes, ...]  # one text, or a text and its pair
_Ids: TypeAlias = npt.NDArray[np.int64]  # [tokens]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input tensor with its name on the wire. BYTES are an object array of bytes."""

    name: str
    datatype: Literal["BYTES", "INT64"]
    array: npt.NDArray[np.object_] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request: the tensors of some rows, the output wanted, and the request parameters."""

    rows: range
    tensors: tuple[Tensor, ...]
    output: str
    parameters: Parameters

    def after(self, seconds: float) -> InferRequest:
        """Return the request as it is sent so long after its first try: with what is left of its deadline."""
        given = self.parameters.get("deadline_ms")
        gone = int(seconds * 1e3)
        if given is None or not gone:
            return self
        # the server refuses a deadline of nothing, so the last try has a little
        left = max(given - gone, min(given, 1))
        return replace(self, parameters={**self.parameters, "deadline_ms": left})


@dataclass(frozen=True, slots=True)
class Rows:
    """The caller's input after checking: either all texts (single or pairs) or all token ids."""

    texts: tuple[_Text, ...] = ()
    ids: tuple[_Ids, ...] = ()

    def __len__(self) -> int:
        return len(self.texts) or len(self.ids)

    def split(self, size: int) -> list[range]:
        """Return consecutive ranges of at most `size` rows that cover all rows."""
        return [range(at, min(at + size, len(self))) for at in range(0, len(self), size)]

    def tensors(self, rows: range) -> tuple[Tensor, ...]:
        """Return the input tensors of these rows."""
        if self.texts:
            return tuple(_text_tensors(self.texts[rows.start : rows.stop]))
        return tuple(_id_tensors(self.ids[rows.start : rows.stop]))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the client needs of a model's config."""

    name: str
    max_batch_size: int
    outputs: Mapping[str, tuple[int, ...]]  # name -> dims without the batch

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelInfo:
        """Read the JSON form of a config; over gRPC its integers may be strings.

        Raises:
            ServerError: the config has not the fields of a model config.
        """
        try:
            outputs = config["output"]
            assert isinstance(outputs, list)
            return cls(
                name=str(config["name"]),
                max_batch_size=int(str(config.get("max_batch_size", 0))),
                outputs={out["name"]: tuple(int(dim) for dim in out["dims"]) for out in outputs},
            )
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise ServerError(f"the model's config cannot be read: {error!r}") from error

    def width(self, method: str, output: str, *, rank: int) -> int:
        """Return the last dimension of `output`, or say that this model does not serve `method`.

        Raises:
            InvalidRequest: the model has no output of that name and rank, or takes no batches.
        """
        if self.max_batch_size < 1:
            raise InvalidRequest(
                f"model {self.name!r} has max_batch_size 0; this client needs at least 1"
            )
        dims = self.outputs.get(output, ())
        if len(dims) != rank:
            found = ", ".join(f"{name} {list(dims)}" for name, dims in self.outputs.items())
            raise InvalidRequest(
                f"model {self.name!r} does not serve {method}: "
                f"it has {found or 'no outputs'}, {method} needs {output} of rank {rank}"
            )
        return dims[-1]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One line of the server's repository index: a model version and its state, such as READY."""

    name: str
    version: str
    state: str

    @property
    def ready(self) -> bool:
        """Whether this version takes requests."""
        return self.state == "READY"


def only_ready_model(models: Sequence[ModelState]) -> str | None:
    """Return the name of the only ready model, None when none is ready.

    Raises:
        ModelNotFound: several are ready, so the caller must choose.
    """
    names = sorted({model.name for model in models if model.ready})
    if len(names) > 1:
        raise ModelNotFound(
            f"the server has {len(names)} ready models, choose one: {', '.join(names)}"
        )
    return names[0] if names else None


def read_inputs(inputs: Inputs) -> Rows:
    """Check texts or token ids.

    Raises:
        InvalidRequest: a single string, a row that is neither text nor a list of integers, or both
            kinds mixed.
    """
    _refuse_one_string(inputs)
    if len(inputs) and isinstance(inputs[0], str):
        return Rows(texts=tuple((_text(row, at),) for at, row in enumerate(inputs)))
    return Rows(ids=tuple(_ids(row, at) for at, row in enumerate(inputs)))


def read_inputs_or_pairs(inputs: Inputs | Pairs) -> Rows:
    """Check texts, token ids or pairs of texts.

    Raises:
        InvalidRequest: as `read_inputs`; or some rows are pairs and some are not.
    """
    _refuse_one_string(inputs)
    if not any(_is_pair(row) for row in inputs):
        return read_inputs(inputs)  # type: ignore[arg-type]  # no row is a pair
    for at, row in enumerate(inputs):
        if not _is_pair(row):
            raise InvalidRequest(f"row {at} is no pair of texts; other rows are")
    return Rows(
        texts=tuple((_text(row[0], at), _text(row[1], at)) for at, row in enumerate(inputs))
    )


def read_query_and_documents(query: str, documents: Sequence[str]) -> Rows:
    """Check a query and its documents; each document is one row, paired with the query."""
    _refuse_one_string(documents)
    return read_inputs_or_pairs([(query, document) for document in documents])


def requests(
    rows: Rows,
    ranges: Sequence[range],
    output: str,
    parameters: Mapping[str, bool | float | None],
) -> Iterator[InferRequest]:
    """Yield one request per range; tensors are built only when a request is about to be sent."""
    given = {name: value for name, value in parameters.items() if value is not None}
    for some in ranges:
        yield InferRequest(some, rows.tensors(some), output, given)


def _text_tensors(texts: Sequence[_Text]) -> Iterator[Tensor]:
    for name, column in zip(("text", "text_pair"), zip(*texts, strict=True), strict=False):
        array = np.empty((len(texts), 1), dtype=np.object_)
        array[:, 0] = column
        yield Tensor(name, "BYTES", array)


def _id_tensors(ids: Sequence[_Ids]) -> Iterator[Tensor]:
    lengths = np.array([row.size for row in ids])  # [rows]
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)  # [rows, longest]
    padded = np.zeros_like(mask)
    padded[mask == 1] = np.concatenate(ids)
    yield Tensor("input_ids", "INT64", padded)
    if lengths.min() < lengths.max():
        yield Tensor("attention_mask", "INT64", mask)


def _refuse_one_string(inputs: object) -> None:
    if isinstance(inputs, (str, bytes)):
        raise InvalidRequest("got one string; pass a list of strings")


def _is_pair(row: object) -> bool:
    return isinstance(row, (tuple, list)) and [isinstance(part, str) for part in row] == [
        True,
        True,
    ]


def _text(row: object, at: int) -> bytes:
    if not isinstance(row, str):
        raise InvalidRequest(f"row {at} is {type(row).__name__}; expected text", rows=_one(at))
    try:
        return row.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"row {at}: text is not valid Unicode", rows=_one(at)) from None


def _ids(row: object, at: int) -> _Ids:
    if isinstance(row, str):
        raise InvalidRequest(f"row {at} is text; the rows before are token ids", rows=_one(at))
    try:
        ids = np.asarray(row)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest(f"row {at} is neither text nor a list of token ids", rows=_one(at))
    return ids.astype(np.int64, copy=False)


def _one(at: int) -> range:
    return range(at, at + 1)
