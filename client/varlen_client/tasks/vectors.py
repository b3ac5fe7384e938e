"""Vectors of texts: `embed`, `sparse_embed`; several outputs of one pass: `outputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from varlen_client.errors import InvalidRequest
from varlen_client.tasks.answers import RowAnswers, RowOutput, Vectors, read_matrix, text_of
from varlen_client.tasks.command import (
    PROMPT_NAME,
    Command,
    Flag,
    exact_values,
    shown_score,
)
from varlen_client.tasks.row_task import (
    Asked,
    InputType,
    Options,
    Outputs,
    RowOptions,
    RowTask,
    method,
)
from varlen_client.wire import Floats, Inputs

OutputDType: TypeAlias = Literal["float32", "float16", "int8", "binary", "ubinary"]

OutputTask: TypeAlias = Literal[
    "embed", "sparse_embed", "token_embed", "hidden", "classify", "rerank"
]

# Elements of the forms of vectors.
_DTYPES: Mapping[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": np.int8,
    "binary": np.int8,
    "ubinary": np.uint8,
}
# Outputs that are arrays, by their tasks; the answer to a row is a row of each.
_ARRAYS: dict[str, RowOutput] = {
    "embed": RowOutput("sentence_embedding"),
    "token_embed": RowOutput("token_embeddings", 2),
    "hidden": RowOutput("last_hidden_state", 2),
    "classify": RowOutput("logits"),
    "rerank": RowOutput("logits"),
}
_SPARSE = "sparse_embed"
# Features in an element of `binary` and `ubinary`.
_BITS = 8
SHOWN_TERMS = 8
SHOWN_VALUES = 4


class EmbedOptions(RowOptions, total=False):
    """Options of embeddings.

    normalize: scale each vector to length 1; by default the checkpoint decides.
    prompt_name: name of the checkpoint's prompt that is put before each text; by default its default one.
    input_type: purpose of the texts, which chooses the checkpoint's prompt of this meaning instead of `prompt_name`.
    instruction: task in words, in the place of the prompt's own.
    prompt: a text that is put before each text, instead of a prompt of the checkpoint.
    dimensions: return only the first features; by default all.
    output_dtype: "float16", "int8", "binary" or "ubinary" return other types, the last two with 8 features in a byte:
        see docs/reference/wire.md. By default fp32.
    spans: parts of the only text, first character and the first behind it, with a vector each: [spans, features].
    windows: read texts that are longer than the model in windows; a vector is the mean of theirs.
    window_overlap: tokens that two windows share; by default 256, or a quarter of a window.
    """

    normalize: bool | None
    prompt_name: str | None
    input_type: InputType | None
    instruction: str | None
    prompt: str | None
    dimensions: int | None
    output_dtype: OutputDType | None
    spans: Sequence[tuple[int, int]] | None
    windows: bool | None
    window_overlap: int | None


class SparseOptions(RowOptions, total=False):
    """Options of sparse vectors.

    max_active_dims: return only the terms of the largest weights; by default the checkpoint decides.
    with_terms: return the texts of the terms too.
    """

    prompt_name: str | None
    input_type: InputType | None
    instruction: str | None
    prompt: str | None
    max_active_dims: int | None
    with_terms: bool


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The terms of a text and their weights, the largest weight first.

    Attributes:
        indices: [terms] int32, numbers of the terms in the model's vocabulary.
        values: [terms] fp32, their weights, all positive.
        terms: their texts, if they were asked for.
    """

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    terms: tuple[str, ...] = ()


def _vector_output(options: Options) -> Outputs:
    given = options.get("output_dtype")
    dtype = "float32" if given is None else given
    if dtype not in _DTYPES:
        raise InvalidRequest(f'output_dtype is "{dtype}"; allowed: {", ".join(_DTYPES)}')
    packs = _BITS if dtype in ("binary", "ubinary") else 1
    width, spans = options.get("dimensions"), options.get("spans")
    output = RowOutput("sentence_embedding", 1, _DTYPES[dtype], width, packs)
    return (output if spans is None else replace(output, rows=len(spans)),)


def _term_output(name: str, dtype: type[np.generic] = np.float32) -> RowOutput:
    """Return an output of terms; a further output of a model has another name."""
    return RowOutput(name, dtype=dtype, other=f"sparse_{name}")


def sparse_outputs(options: Options) -> Outputs:
    """Return the outputs of sparse vectors, perhaps with texts of terms."""
    outputs = (
        _term_output("indices", np.int32),
        _term_output("values"),
        _term_output("num_terms", np.int32),
    )
    terms = _term_output("terms", np.object_)
    return (*outputs, terms) if options.get("with_terms") else outputs


def sparse_vectors(answers: RowAnswers) -> list[SparseVector]:
    """Return the vector of each row, with texts of terms if they were requested."""
    own = {each.name.removeprefix("sparse_"): each.name for each in answers.outputs}
    vectors = []
    for request in answers.requests:
        for row, count in enumerate(request[own["num_terms"]][:, 0].tolist()):
            terms = request[own["terms"]][row, :count] if "terms" in own else ()
            # not views, which would keep the whole response alive
            indices, values = (
                request[own[name]][row, :count].copy() for name in ("indices", "values")
            )
            vectors.append(SparseVector(indices, values, tuple(map(text_of, terms))))
    return vectors


def _value_lines(vector: Floats) -> list[str]:
    values = ", ".join(f"{value:.4f}" for value in vector[:SHOWN_VALUES])
    more = ", …" if len(vector) > SHOWN_VALUES else ""
    return [f"{len(vector)} values  [{values}{more}]"]


def _term_lines(vector: SparseVector) -> list[str]:
    pairs = zip(vector.terms[:SHOWN_TERMS], vector.values, strict=False)
    shown = ", ".join(f"{term} {shown_score(value)}" for term, value in pairs)
    more = ", …" if len(vector.terms) > SHOWN_TERMS else ""
    return [f"{len(vector.terms)} terms  [{shown}{more}]"]


EMBED: RowTask[Vectors] = RowTask(
    "embed",
    EmbedOptions,
    _vector_output,
    read_matrix,
    pooling="embed",
    command=Command(
        task="embed",
        words=("embeds texts", "vectors of texts", "an embedding model"),
        summary="Print or write the vectors of texts.",
        synonyms="embedding embeddings encode vectorize",
        progress="embedding",
        fields=lambda vector: {"embedding": exact_values(vector)},
        lines=_value_lines,
    ),
)
SPARSE_EMBED: RowTask[list[SparseVector]] = RowTask(
    "sparse_embed",
    SparseOptions,
    sparse_outputs,
    sparse_vectors,
    not_sent=["with_terms"],
    command=Command(
        task="sparse_embed",
        words=("weighs terms of texts", "sparse vectors", "a SPLADE model"),
        summary="Print the terms of texts and their weights (SPLADE).",
        details="The terms with the largest weights come first.",
        synonyms="splade",
        texts="Texts to embed.",
        file="Embed each line of this UTF-8 file; - is stdin.",
        json="Print one JSON object per text, with all terms.",
        progress="embedding",
        flags={
            "prompt_name": PROMPT_NAME,
            "max_active_dims": Flag(int | None, "Keep only the N largest weights.", min=1),
        },
        sent=lambda **given: {**given, "with_terms": True},
        fields=lambda vector: {
            "indices": vector.indices.tolist(),
            "values": exact_values(vector.values),
            "terms": vector.terms,
        },
        lines=_term_lines,
    ),
)


class OutputsOptions(EmbedOptions, total=False):
    """Options of several outputs.

    max_active_dims: keep only the terms of the largest weights; by default the checkpoint decides.
    """

    max_active_dims: int | None


class _Asked(OutputsOptions, total=False):
    """Options of a call with its tasks."""

    tasks: Sequence[str]


def _several_outputs(options: Options) -> Outputs:
    tasks = options["tasks"]
    unknown = [task for task in tasks if task != _SPARSE and task not in _ARRAYS]
    if unknown or not tasks:
        raise InvalidRequest(
            f"tasks is {list(tasks)}; allowed: one or more of {', '.join((_SPARSE, *_ARRAYS))}"
        )
    if options.get("output_dtype") not in (None, "float32"):
        raise InvalidRequest(
            f"output_dtype is {options['output_dtype']}; allowed with several outputs: float32"
        )
    found: list[RowOutput] = []
    for task in dict.fromkeys(tasks):
        if task == _SPARSE:
            found += sparse_outputs({})
        elif task == "embed":
            found.append(replace(_ARRAYS[task], width=options.get("dimensions")))
        else:
            found.append(_ARRAYS[task])
    return tuple(found)


def _read_several(answers: RowAnswers) -> list[dict[str, Any]]:
    """Return the outputs of each row by task."""
    tasks = list(dict.fromkeys(answers.options["tasks"]))
    columns = [
        sparse_vectors(answers)
        if task == _SPARSE
        else [row.copy() for (array,) in answers.each(_ARRAYS[task].name) for row in array]
        for task in tasks
    ]
    return [dict(zip(tasks, row, strict=True)) for row in zip(*columns, strict=True)]


SEVERAL: RowTask[list[dict[str, Any]]] = RowTask(
    "outputs", _Asked, _several_outputs, _read_several, not_sent=["tasks"]
)
# An answer with tokens is padded to the longest row of its request.
SEVERAL_OF_TOKENS = replace(SEVERAL, row_by_row=True)


def several(tasks: Sequence[str]) -> RowTask[list[dict[str, Any]]]:
    """Return the task of a call for the outputs of these tasks."""
    of_tokens = any(task in _ARRAYS and _ARRAYS[task].rank > 1 for task in tasks)
    return SEVERAL_OF_TOKENS if of_tokens else SEVERAL


class VectorMethods:
    """Methods for vectors of texts, and for several outputs."""

    @method
    def embed(self, inputs: Inputs, **options: Unpack[EmbedOptions]) -> Asked[Vectors]:
        """Return one vector per row, [rows, features] fp32, in the order of `inputs`.

        Args:
            inputs: texts, or lists of token ids; lengths may differ.

        Raises:
            VarlenClientError: see errors.py. `rows` is the range of rows in the failed request.
        """
        return EMBED.of(inputs, options)

    @method
    def sparse_embed(
        self, inputs: Inputs, **options: Unpack[SparseOptions]
    ) -> Asked[list[SparseVector]]:
        """Return the sparse vector of each row: terms of the vocabulary and their weights.

        Inputs and errors are the same as in `embed`; see `SparseOptions`.
        """
        return SPARSE_EMBED.of(inputs, options)

    @method
    def outputs(
        self, inputs: Inputs, tasks: Sequence[OutputTask], **options: Unpack[OutputsOptions]
    ) -> Asked[list[dict[str, Any]]]:
        """Return the outputs of each row by task, made in one pass.

        Args:
            inputs: texts, or lists of token ids.
            tasks: the model's own task, and tasks of its setting `outputs`.

        Returns:
            Per row: embed [features]; sparse_embed a `SparseVector`; token_embed [vectors, features]; hidden [tokens,
            features]; classify and rerank [labels], logits. Errors are the same as in `embed`.
        """
        return several(tasks).of(inputs, {**options, "tasks": tasks})
