"""The wire format: input rows as tensors, and what the client reads of a config.

One row is one sequence. Texts are sent as `text` BYTES [rows, 1]; pairs add `text_pair`. Token ids are
sent as `input_ids` INT64 [rows, longest] with an `attention_mask`. The server drops this padding, so
rows of different lengths may share a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_client.errors import InvalidRequest, ModelNotFound, ServerError

Floats: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Inputs: TypeAlias = Sequence[str] | Sequence[TokenIds] | npt.NDArray[np.integer[Any]]
Pairs: TypeAlias = Sequence[tuple[str, str]]

Parameters: TypeAlias = Mapping[str, Any]
# The outputs of a response by name; None where one is missing.
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any] | None]

_Text: TypeAlias = tuple[bytes, ...]  # one text, or a text and its pair
_Ids: TypeAlias = npt.NDArray[np.int64]  # [tokens]
# Token ids of a request of several rows, padding included.
_MAX_PADDED_IDS = 1 << 20
# The task of models whose config does not name it, by an output and its number of dimensions; None is any.
_TASK_OF_OUTPUT: Mapping[tuple[str, int | None], str] = {
    ("sentence_embedding", None): "embed",
    ("indices", None): "sparse_embed",
    ("num_masks", None): "fill_mask",
    ("num_spans", None): "extract",
    ("answers", None): "question_answer",
    ("token_embeddings", None): "token_embed",
    ("last_hidden_state", None): "hidden",
    ("text_output", None): "generate",
    ("logits", 1): "classify",
    ("logits", 2): "token_classify",
}
_LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input tensor and its name; BYTES is an object array of bytes."""

    name: str
    datatype: Literal["BYTES", "INT64", "BOOL"]
    array: npt.NDArray[np.object_] | npt.NDArray[np.int64] | npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request: input tensors, the names of the requested outputs, and parameters."""

    rows: range
    tensors: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Rows:
    """The caller's checked input: either texts (single or pairs) or token ids."""

    texts: tuple[_Text, ...] = ()
    ids: tuple[_Ids, ...] = ()

    def __len__(self) -> int:
        return len(self.texts) or len(self.ids)

    def split(self, size: int) -> list[range]:
        """Return consecutive ranges of at most `size` rows that cover all rows.

        Ranges of token ids are shorter where the padding to the longest row would be large.
        """
        if self.texts:
            return [range(i, min(i + size, len(self))) for i in range(0, len(self), size)]
        ranges, begin, longest = list[range](), 0, 0
        for index, row in enumerate(self.ids):
            longest = max(longest, row.size)
            rows = index + 1 - begin
            if rows > 1 and (rows > size or rows * longest > _MAX_PADDED_IDS):
                ranges.append(range(begin, index))
                begin, longest = index, row.size
        return [*ranges, range(begin, len(self.ids))] if self.ids else []

    def tensors(self, rows: range) -> tuple[Tensor, ...]:
        """Return the input tensors of these rows."""
        if self.texts:
            return tuple(_text_tensors(self.texts[rows.start : rows.stop]))
        return tuple(_id_tensors(self.ids[rows.start : rows.stop]))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The parts of a model's config that the client needs.

    Attributes:
        max_batch_size: largest number of rows in one request.
        outputs: dims of each output by name, without the batch.
        settings: settings of the engine by name, without the ones that the config leaves to the checkpoint.
        requires_pairs: whether each request needs the second texts of pairs.
        backend: name of the backend that runs the model.
        instances: number of instances, each in a process of its own.
    """

    name: str
    max_batch_size: int
    outputs: Mapping[str, tuple[int, ...]]
    settings: Mapping[str, str] = field(default_factory=dict)
    requires_pairs: bool = False
    inputs: tuple[str, ...] = ()
    backend: str = ""
    instances: int = 1

    @property
    def can_be_watched(self) -> bool:
        """Whether one process of varlen answers all requests to the model."""
        return self.backend == "varlen" and self.instances == 1

    @property
    def generates(self) -> bool:
        """Whether the answers are generated texts."""
        return "text_output" in self.outputs

    @property
    def task(self) -> str | None:
        """The task; None if the config leaves it to the checkpoint."""
        return self.settings.get("task")

    @property
    def known_task(self) -> str | None:
        """The task, by the outputs if the config does not name it.

        None if they are of no task. By outputs alone, a reranker classifies, and a translator generates.
        """
        if self.task is not None:
            return self.task
        of_outputs = (
            _TASK_OF_OUTPUT.get((name, None)) or _TASK_OF_OUTPUT.get((name, len(dims)))
            for name, dims in self.outputs.items()
        )
        return next(filter(None, of_outputs), None)

    @property
    def labels_texts(self) -> bool:
        """Whether the answers are labels of whole texts, or scores of pairs."""
        return self.known_task in ("classify", "rerank")

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelInfo:
        """Return the info in a config's JSON form; over gRPC its integers may be strings.

        Raises:
            ServerError: a field is missing or has another type.
        """
        try:
            outputs = config["output"]
            assert isinstance(outputs, list)
            inputs = config.get("input") or []
            assert isinstance(inputs, list)
            parameters = config.get("parameters") or {}
            assert isinstance(parameters, dict)
            return cls(
                name=str(config["name"]),
                max_batch_size=int(str(config.get("max_batch_size", 0))),
                outputs={out["name"]: tuple(int(dim) for dim in out["dims"]) for out in outputs},
                # the JSON form of gRPC leaves out empty strings
                settings={
                    key: str(value.get("string_value", "")) for key, value in parameters.items()
                },
                requires_pairs=any(
                    entry["name"] == "text_pair" and not entry.get("optional") for entry in inputs
                ),
                inputs=tuple(entry["name"] for entry in inputs),
                backend=str(config.get("backend", "")),
                instances=_num_instances(config.get("instance_group") or [{}]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, AssertionError) as error:
            raise ServerError(f"the model's config cannot be read: {error!r}") from error

    def width(self, method: str, output: str, *, rank: int) -> int:
        """Return the last dimension of `output`, which `method` needs.

        Raises:
            InvalidRequest: the model has no output of that name and rank, or no batch dimension.
        """
        dims = self.outputs.get(output, ())
        if len(dims) != rank:
            raise self._does_not_serve(method, f"{output} of rank {rank}")
        if self.max_batch_size < 1:
            raise InvalidRequest(
                f"model {self.name!r} has max_batch_size 0; this client needs at least 1"
            )
        return dims[-1]

    def check_generates(self) -> None:
        """Raise InvalidRequest if this model does not generate text."""
        if not self.generates:
            raise self._does_not_serve("generate", "text_output")

    def check_translates(self) -> None:
        """Raise InvalidRequest if this model is known not to translate text.

        Without a task in the config, the server refuses what the model does not serve.
        """
        if self.task not in (None, "translate"):
            raise InvalidRequest(
                f"model {self.name!r} does not serve translate: its task is {self.task}"
            )
        if not self.generates:
            raise self._does_not_serve("translate", "text_output")

    def _does_not_serve(self, method: str, needed: str) -> InvalidRequest:
        outputs = ", ".join(f"{name} {list(dims)}" for name, dims in self.outputs.items())
        found = (
            f"it has {outputs or 'no outputs'}" if self.task is None else f"its task is {self.task}"
        )
        return InvalidRequest(
            f"model {self.name!r} does not serve {method}: {found}; {method} needs {needed}"
        )


@dataclass(frozen=True, slots=True)
class ModelState:
    """Name, version and state (such as READY) of a model in the server's repository index."""

    name: str
    version: str
    state: str

    @property
    def ready(self) -> bool:
        """Whether this version is ready for requests."""
        return self.state == "READY"


def only_ready_model(models: Sequence[ModelState]) -> str | None:
    """Return the name of the only ready model; None when none is ready.

    Raises:
        ModelNotFound: several models are ready, so the caller must choose one.
    """
    names = sorted({model.name for model in models if model.ready})
    if len(names) > 1:
        raise ModelNotFound(
            f"the server has {len(names)} ready models, choose one: {', '.join(names)}"
        )
    return names[0] if names else None


def read_inputs(inputs: Inputs | Pairs, *, takes_pairs: bool = False) -> Rows:
    """Return the checked rows of texts or token ids.

    Raises:
        InvalidRequest: a single string, a row that is neither text nor a list of integers, a mix of
            both, or only some rows are pairs.
    """
    check_not_a_string(inputs)
    if takes_pairs and any(_is_pair(row) for row in inputs):
        for index, row in enumerate(inputs):
            if not _is_pair(row):
                raise _invalid_row(index, "is not a pair of texts; other rows are")
        return Rows(
            texts=tuple(
                (_text(row[0], index), _text(row[1], index)) for index, row in enumerate(inputs)
            )
        )
    if len(inputs) and isinstance(inputs[0], str):
        return Rows(texts=tuple((_text(row, index),) for index, row in enumerate(inputs)))
    return Rows(ids=tuple(_ids(row, index) for index, row in enumerate(inputs)))


def query_and_documents(query: str, documents: Sequence[str]) -> Pairs:
    """Return one row per document, each a pair of the query and the document.

    Raises:
        InvalidRequest: the documents are a single string.
    """
    check_not_a_string(documents)
    return [(query, document) for document in documents]


def check_not_a_string(inputs: object) -> None:
    """Raise InvalidRequest if rows are a single string, whose characters are not meant."""
    if isinstance(inputs, (str, bytes)):
        raise InvalidRequest("got one string; pass a list of strings")


def with_remaining_deadline(
    parameters: Mapping[str, Any], elapsed_seconds: float
) -> Mapping[str, Any]:
    """Return the parameters with `deadline_ms` reduced by the time since the first attempt."""
    deadline_ms = parameters.get("deadline_ms")
    elapsed_ms = int(elapsed_seconds * 1e3)
    if deadline_ms is None or not elapsed_ms:
        return parameters
    # The server refuses a deadline of 0, so the last attempt gets 1 ms at least.
    remaining = max(deadline_ms - elapsed_ms, min(deadline_ms, 1))
    return {**parameters, "deadline_ms": remaining}


def _num_instances(groups: Any) -> int:
    """Return the instances in a config's groups; a group has `count` on each GPU."""
    return sum(
        int(group.get("count", 1)) * max(len(group.get("gpus") or []), 1) for group in groups
    )


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


def _is_pair(row: object) -> bool:
    return isinstance(row, (tuple, list)) and [isinstance(part, str) for part in row] == [
        True,
        True,
    ]


def _text(row: object, index: int) -> bytes:
    if not isinstance(row, str):
        raise _invalid_row(index, f"is {type(row).__name__}; expected text")
    try:
        return row.encode()
    except UnicodeEncodeError:
        raise _invalid_row(index, "is not valid Unicode") from None


def _ids(row: object, index: int) -> _Ids:
    if isinstance(row, str):
        raise _invalid_row(index, "is text; the rows before are token ids")
    try:
        ids = np.asarray(row)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise _invalid_row(index, "is neither text nor a list of token ids")
    if ids.dtype.kind == "u" and ids.size and ids.max() > _LARGEST_ID:
        # the server's integers have 64 bits with a sign
        raise _invalid_row(index, f"has the token id {ids.max()}; allowed: up to {_LARGEST_ID}")
    return ids.astype(np.int64, copy=False)


def _invalid_row(index: int, problem: str) -> InvalidRequest:
    return InvalidRequest(f"row {index} {problem}", rows=range(index, index + 1))
